"""One object a framework: how its files are recognised, composed, planned and written."""
