"""Programs as data, and the back ends that run them: nothing here knows how a step is recorded."""
