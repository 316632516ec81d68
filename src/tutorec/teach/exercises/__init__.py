"""The exercises of the book, one module per chapter: `chNN.EXERCISES` is a tuple of `Exercise`."""
