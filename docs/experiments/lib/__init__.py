"""What several experiments use."""
