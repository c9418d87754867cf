"""Thin wrappers around the operating system and what is installed on this machine.

- What this machine has: ``detect_host`` makes the value in ``machine`` from ``cores``
  and ``gpus``. ``nvml`` asks NVIDIA's driver; ``gpu_state`` and ``visibility`` tell
  what can be used now, ``shortage`` what has run out.
- Processes: ``process_state`` tells of them, ``processes`` and ``forked_call`` act; ``reactor``
  waits for them and for everything else; ``descriptors`` and ``printable`` carry what
  they print.
- The network: ``network`` and ``host_names``.
- Files and names: ``folder``, ``named_files``, ``users_files``, ``inotify`` and ``sysfs``; the
  variables in ``own_variables`` and ``rank_variables``; plug-ins in ``entry_points``, and
  ``exclusion`` of a node.
"""
