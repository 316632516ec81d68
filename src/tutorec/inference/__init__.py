"""Models that answer requests: quantized, sharded, as a graph, as a file that a process without Python loads."""
