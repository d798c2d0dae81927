"""The saver: one process per node, without torch, that outlives ranks and launcher until what is complete is durable."""
