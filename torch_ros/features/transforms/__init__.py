"""Casts and quantises copies. Without it a program brings transforms of its own."""
