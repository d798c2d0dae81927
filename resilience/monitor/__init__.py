"""Who listens: one small process per rank that reads the page, judges it, testifies and holds the kill ladder."""
