"""From a run's log to what happened, the rule behind it, and the next command."""
