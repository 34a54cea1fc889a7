"""The core that DTensor and ShardedTensor share: the base class, factor maps, pictures."""
