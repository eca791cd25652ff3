"""What a drafter is worth: speculative decoding, acceptance, speed, exact text, parity with training, the same in a server."""
