"""Texts to vectors and scores."""
