"""What to do: candidates that are legal, ranked under budgets."""
