"""What is promised, measured: ``python -m benchmarks`` runs all, ``python -m benchmarks NAME`` one.

Every module has one function ``run`` that returns plain rows. NVRx is measured beside us when ``BENCH_NVRX`` names
a virtual environment that has it; otherwise its rows say so.
"""
