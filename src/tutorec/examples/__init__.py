"""Scripts to start from a terminal, alone or under ``torchrun``; each is a whole program to read and to change."""
