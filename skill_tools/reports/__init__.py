"""Renders what the engine and the planner found; decides nothing."""
