"""Data parallelism: replicas of a module on every rank, whose gradients are averaged.

``buckets`` assigns gradients to buckets (pure), ``reducer`` reduces them during backward, ``ddp``
is the module wrapper, ``join`` lets ranks run out of inputs at
different times, ``report`` shows what a step did.
"""
