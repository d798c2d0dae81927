"""Tests on real parts that need root and Debian packages (``make test-real``)."""
