"""What the pages say, held against what the program does."""
