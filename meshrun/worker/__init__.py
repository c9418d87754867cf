"""After the fork: a rank, from its start to its end; and what others need of it before.

A zygote, too, reads the program's source (``program``, ``early_settings``), arranges its imports
(``imports``), prepares for stack dumps (``stack_handler``) and makes the ``ExitHandler`` that its
forks inherit. With ``--warm``, the launcher reads the source and what the last run imported
(``import_record``). Ranks use these modules themselves, so they are here: ``zygote/`` and ``warm/``
import ``worker/``, never the reverse.
"""
