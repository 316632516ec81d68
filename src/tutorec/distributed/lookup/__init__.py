"""What a rank computes between the two exchanges: rows out of the tables that it holds."""
