"""What a run takes: parameters, states, activations, in bytes and FLOPs."""
