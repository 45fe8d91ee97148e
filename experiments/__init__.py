"""Runnable studies with their results committed; each says how to run it again."""
