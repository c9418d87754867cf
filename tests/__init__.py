"""The tests of meshrun.

=============  ====================================================================
folder         what it tests
=============  ====================================================================
unit           a module or a rule, in this process
process        launches of real processes, with a fake torch where torch does not matter
torch          launches whose ranks use the real torch
engines        several hosts, each in namespaces of its own: static, c10d, etcd, ``--hosts``;
               real Slurm, MPIs, Grid Engine and Ray
chaos          launches that a random fault hits at a random moment
golden         output, help, references and schemas, word for word
docs           the blocks, links and manifests of the documentation, and its site
architecture   imports between modules, public names, and what an addition takes
package        the distributions, as users install them
integrations   small trainings with libraries that detect their launcher
fuzz           any input to whatever parses, guided by coverage
gpu            launches on real GPUs: ``python -m tests.gpu``
benchmarks     measurements, which are no tests: ``python -m tests.benchmarks``
=============  ====================================================================

``programs/`` has what ranks run in them, and ``fakes/`` stand-ins for torch, its back ends,
NVIDIA's driver and NVML. The modules here are helpers: ``kit.py`` starts launches and waits for
conditions, ``conftest.py`` has the fixtures, and ``variations.py`` decides what is nightly.
"""
