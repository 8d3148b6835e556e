"""Sliding windows and recurrent states: layers that keep less than every token, and the families that need them."""
