# ruff: noqa: E501
"""Twenty planted faults in how devices are handled: is every one of them noticed without a GPU?

python -m tests.device_faults [numbers]    with the options of tests/mutations.py
"""

import sys

from tests import mutations

FAULTS = [
    ("comm/types.py", "    stream.synchronize()\n", "    pass\n", "test_devices.py -k 'DataParallelNaive'"),
    ("comm/types.py", "        stream.wait_stream(torch.cuda.current_stream(tensor.device))\n", "        pass\n", "test_devices.py -k 'DataParallelNaive'"),
    ("comm/types.py", "pin_memory=tensor.is_cuda", "pin_memory=True", "test_transports.py -k elsewhere_travels"),
    ("comm/types.py", "            self.tensor.detach().copy_(self._host, non_blocking=True)\n", "            pass\n", "test_devices.py -k 'DataParallelNaive'"),
    ("parallel/context/plain.py", "masked_fill(later.to(q.device), ", "masked_fill(later, ", "test_devices.py -k 'zigzag'"),
    ("parallel/expert/plain.py", "torch.arange(len(expert), device=x.device)", "torch.arange(len(expert))", "test_devices.py -k 'Experts'"),
    ("parallel/expert/layer.py", "torch.arange(len(expert), device=x.device)", "torch.arange(len(expert))", "test_devices.py -k 'Experts'"),
    ("parallel/expert/layer.py", "dtype=torch.bool, device=x.device)", "dtype=torch.bool)", "test_devices.py -k 'Experts'"),
    ("gradients/buckets.py", "(self.numel + extra, dtype=dtype, device=device)", "(self.numel + extra, dtype=dtype)", "test_devices.py -k 'DataParallel-'"),
    ("gradients/reducer.py", "own = whole.new_empty(bucket.shards.length)", "own = torch.empty(bucket.shards.length, dtype=whole.dtype)", "test_devices.py -k 'ZeroOptimizer and 2'"),
    ("parallel/zero/sharded/unit.py", "dtype=first.dtype, device=first.device)", "dtype=first.dtype)", "test_devices.py -k 'fully_shard'"),
    ("parallel/pipeline/edges.py", "torch.empty(shape, dtype=dtype, device=self.device, requires_grad", "torch.empty(shape, dtype=dtype, requires_grad", "test_devices.py -k 'gpipe'"),
    ("parallel/pipeline/stage.py", "torch.device(device or (parameter.device if parameter is not None else \"cpu\"))", "torch.device(\"cpu\")", "test_devices.py -k 'gpipe'"),
    ("parallel/local/full.py", "way.view_as(parameter).to(parameter.dtype)", "way.view_as(parameter).to(\"cpu\", parameter.dtype)", "test_devices.py -k 'LocalSGD'"),
    ("parallel/data/batch_norm.py", "mean.new_tensor([count])", "torch.tensor([count], dtype=mean.dtype)", "test_devices.py -k 'SyncBatchNorm'"),
    ("parallel/tensor/checks.py", "x.detach().cpu().contiguous()", "x.detach().contiguous()", "test_devices.py -k 'tensor'"),
    ("parallel/data/full.py", "        return self.module(*args, **kwargs)\n", "        torch.cuda.synchronize()\n        return self.module(*args, **kwargs)\n", "test_devices.py -k named"),
    ("horovod/operations.py", "torch.tensor(True, device=average.device)", "torch.tensor(True, device=\"cuda\")", "test_devices.py -k named"),
    ("comm/torch/nccl.py", "    except RuntimeError as problem:\n", "    except ValueError as problem:\n", "test_devices.py -k refuses"),
    ("comm/torch/nccl.py", "or all(shares for", "or any(shares for", "test_transports.py -k leave_to_share"),
]  # fmt: skip

if __name__ == "__main__":
    mutations.MUTATIONS[:], mutations.TIERS = FAULTS, "not nightly"
    sys.exit(mutations.main())
