"""Random faults, over and over: a short form in the suite, a long one behind ``make soak``."""
