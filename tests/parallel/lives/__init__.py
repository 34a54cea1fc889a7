"""Lives of models: random acts of users, in each way of wrapping, beside a plain model.

- ``model``: the model and the rows;
- ``ways``: what wraps it;
- ``body``: a model in life, plain or wrapped, and the acts;
- ``drawing``: random lives;
- ``living``: lives on ranks, compared with the plain model's;
- ``refusals``: what may be refused;
- ``minimise``: shorter lives that go wrong as a long one did.
"""
