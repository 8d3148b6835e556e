"""What teaches: the tasks of `nanoinfer learn`, and the engine in one file."""
