"""The scripts that the benchmarks run: the same ones under every launcher."""
