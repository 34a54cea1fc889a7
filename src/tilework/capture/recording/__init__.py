"""The recording of a step: the call, the state that the step can reach, and numbers in the step."""
