"""What a rank says: the page it writes, the calls that write it, and the timeouts learned from it."""
