"""The small engine that holds a configuration against the rules in `knowledge/rules/`."""
