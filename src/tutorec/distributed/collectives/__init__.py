"""The moves between ranks: ids to the tables, pooled rows home, and the gradients of both."""
