"""Data parallelism: replicas of a module on every rank, whose gradients are averaged.

``ddp`` is the module wrapper: ``arguments`` are checked, ``replicas`` compared and made the same,
``structure`` notices when the module changes. ``buckets`` assigns gradients to buckets (pure),
``bucket_memory`` holds them, ``reducer`` reduces them during backward, ``report`` shows what a step
did. ``join`` lets ranks run out of inputs at different times.
"""
