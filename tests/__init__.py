"""The tests, one folder for each of the project's. Not installed."""
