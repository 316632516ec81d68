"""Models that stand on the collections of tables, and what they are judged by."""
