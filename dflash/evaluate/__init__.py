"""What a drafter is worth: speculative decoding, acceptance, speed, exact text, parity with training and with a server."""
