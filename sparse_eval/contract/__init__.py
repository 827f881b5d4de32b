"""What every policy promises, one function a promise; a check prints its name, read as text."""
