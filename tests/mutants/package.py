"""Faults in src/tilework."""

from __future__ import annotations

from tests.mutants.mutant import Mutant


def fault(name: str, path: str, old: str, new: str, caught_by: str) -> Mutant:
    return Mutant(name, f"src/tilework/{path}", old, new, caught_by)


GEOMETRY = [
    fault(
        "chunk_size: rounded down",
        "layout/box.py",
        "    return -(-extent // n)\n",
        "    return extent // n\n",
        "tests/layout/test_box_chunks.py",
    ),
    fault(
        "intersection: one element short",
        "layout/box.py",
        "            size = (a + m if a + m < b + n else b + n) - low\n",
        "            size = (a + m if a + m < b + n else b + n) - low - (m > 1)\n",
        "tests/layout/test_box.py",
    ),
    fault(
        "contains: an end that is equal",
        "layout/box.py",
        "            a <= b and b + n <= a + m\n",
        "            a <= b and b + n < a + m\n",
        "tests/layout/test_box.py",
    ),
    fault(
        "transfers: a tile's owner is sent its own elements",
        "layout/tile_transfers.py",
        "for dst in tiles[d].owners if dst not in have]",
        "for dst in tiles[d].owners]",
        "tests/layout/test_planning.py",
    ),
    fault(
        "cost: an all-gather costs nothing",
        "layout/cost.py",
        "                    nbytes *= length\n"
        "                    price += self.latency_bytes + share * nbytes\n",
        "                    nbytes *= length\n",
        "tests/layout/test_cost.py",
    ),
]

GRADIENTS = [
    fault(
        "all_reduce: the adjoint of avg is not divided",
        "comm/functional/kinds.py",
        "        return total / size_of(group)\n",
        "        return total\n",
        "tests/comm/functional/test_api_gradients.py",
    ),
    fault(
        "all_reduce: ties of a maximum all have the whole gradient",
        "comm/functional/kinds.py",
        '    return mine / run(AllReduce, mine, group, "sum")\n',
        "    return mine\n",
        "tests/comm/functional/test_api_gradients.py",
    ),
    fault(
        "losses: a shard's mean counts as the whole's",
        "tiled/rules/losses.py",
        "            return loss_value if share is None else loss_value * share\n",
        "            return loss_value\n",
        "tests/dtensor/rules/test_losses.py",
    ),
    fault(
        "DTensor: partial gradients stay as they are",
        "dtensor/autograd/partial_grads.py",
        "        return _reduced(grad, ctx.partial, ctx.source, ctx.of), None, None, None\n",
        "        return _reduced(grad, ctx.source, ctx.source, ctx.of), None, None, None\n",
        "tests/dtensor/autograd",
    ),
    fault(
        "DTensor: results of users' Functions are linked when they are used",
        "dtensor/autograd/local_graph.py",
        "    if not tensors or not torch.is_grad_enabled():\n        return\n",
        "    if tensors or not torch.is_grad_enabled():\n        return\n",
        "tests/dtensor/views/test_places.py",
    ),
    fault(
        "DDP: gradients are summed",
        "parallel/data_parallel/reducer.py",
        "return all_reduce(flat, ReduceOp.AVG, self.active, async_op)",
        "return all_reduce(flat, ReduceOp.SUM, self.active, async_op)",
        "tests/parallel/data_parallel/test_ddp.py",
    ),
    fault(
        "buckets: the limit of the first for all",
        "parallel/data_parallel/buckets.py",
        "            bucket.limit = min(bucket.limit + 1, len(size_limits) - 1)\n",
        "            bucket.limit = min(bucket.limit, len(size_limits) - 1)\n",
        "tests/parallel/data_parallel/test_buckets.py",
    ),
    fault(
        "PowerSGD: the error is not fed back",
        "parallel/comm_hooks/powersgd.py",
        "        buffer.add_(error)\n",
        "        pass\n",
        "tests/parallel/comm_hooks/test_powersgd.py",
    ),
    fault(
        "SyncBatchNorm: ranks count alike",
        "parallel/sync_batch_norm.py",
        "        mean = (means * counts).sum(0) / total.clamp_min(1)\n",
        "        mean = means.mean(0)\n",
        "tests/parallel/test_sync_batch_norm.py",
    ),
    fault(
        "SyncBatchNorm: the running variance is biased",
        "parallel/sync_batch_norm.py",
        "        unbiased = var * (count / max(1, count - 1))\n",
        "        unbiased = var\n",
        "tests/parallel/test_sync_batch_norm.py",
    ),
]

COMPARISONS = [
    fault(
        "DTensor: plain tensors are not verified",
        "dtensor/dispatch/call.py",
        "    seeds.append(content_digest(arg))\n",
        "    seeds.append(0)\n",
        "tests/dtensor/test_verify.py",
    ),
    fault(
        "call: numbers count by their kinds",
        "dtensor/dispatch/call.py",
        "            key.append(arg if arg and kind is not complex else repr(arg))",
        "            pass",
        "tests/csrc/python/test_operator_call.py",
    ),
    fault(
        "ways: copies in torch show memory",
        "dtensor/dispatch/ways.py",
        "    return result.clone() if storage_of(result)",
        "    return result if storage_of(result)",
        "tests/dtensor/rules/test_reshaping.py",
    ),
    fault(
        "normalize: a tensor is a number wherever one may be",
        "tiled/normalize.py",
        "            readers[place] = _whole_unless_tensor if is_either else _whole\n",
        "            readers[place] = _whole\n",
        "tests/tiled/test_normalize_numbers.py",
    ),
    fault(
        "digests: numbers do not count",
        "dtensor/provenance/digests.py",
        "        return _MINUS_ONE\n    return int(number) if",
        "        return _MINUS_ONE\n    return 0 if",
        "tests/dtensor/test_verify.py",
    ),
    fault(
        "verify: elements are not compared",
        "dtensor/verify.py",
        "        if fact.content != facts[known].content:\n",
        "        if False:\n",
        "tests/dtensor/test_verify.py",
    ),
    fault(
        "agree_equal: facts that a rank lacks",
        "comm/agreement.py",
        "dict.fromkeys([*first, *(name for _, theirs in others for name in theirs)]):\n",
        "first:\n",
        "tests/comm/test_agreement.py",
    ),
    fault(
        "store: a server without the secret is believed",
        "store/pool.py",
        "    if have_secret and not proven:\n",
        "    if have_secret and not proven and expected is not None:\n",
        "tests/store tests/rendezvous",
    ),
    fault(
        "store: a client without the secret is let in",
        "store/service.py",
        'if hmac.compare_digest(wire.proof(secret, b"client", nonces), message.fields[0]):',
        "if True:",
        "tests/store/test_server.py tests/store/test_contract.py",
    ),
    fault(
        "objects: strangers' pickles are loaded",
        "comm/operations/objects.py",
        "    if pg is None or weights_only or pg.authenticated:\n",
        "    if True:\n",
        "tests/comm/operations/test_objects.py",
    ),
    fault(
        "consensus: a refusal is overheard",
        "comm/elastic/consensus.py",
        "        refused = any(answer not in (None, _YES) for answer in answers.values())\n",
        "        refused = False\n",
        "tests/comm/elastic/test_consensus.py",
    ),
    fault(
        "consensus: the absent are not waited for",
        "comm/elastic/consensus.py",
        "        if not absent - participant.lost(absent) or participant.clock() >= deadline:\n",
        "        if True:\n",
        "tests/comm/elastic/test_consensus.py",
    ),
    fault(
        "checkpoint: checksums are not compared",
        "checkpoint/reading.py",
        "            if is_checked and found != part.crc32[(start + at) // chunk]:\n",
        "            if False:\n",
        "tests/checkpoint/test_reading.py",
    ),
]

DATA = [
    fault(
        "sampler: the last rows are left out",
        "data/sampler.py",
        '        if self.uneven == "pad" and missing:\n',
        '        if self.uneven == "never" and missing:\n',
        "tests/data/test_sampler_rows.py",
    ),
    fault(
        "sampler: each epoch has one order",
        "data/sampler.py",
        "manual_seed(seed + epoch)",
        "manual_seed(seed)",
        "tests/data/test_sampler_rows.py tests/data/test_sampler.py",
    ),
]

PACKAGE = [*GEOMETRY, *GRADIENTS, *COMPARISONS, *DATA]
