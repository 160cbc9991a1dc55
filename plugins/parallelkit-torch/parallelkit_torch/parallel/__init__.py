"""How a model is spread: one module an axis, and the context that puts them in order.

| where | what |
|---|---|
| `setup`, `context`, `settings` | what was asked for, the handle, its options |
| `recipe` | the order in which axes are applied, written once |
| `mesh` | ranks of a plan as a `DeviceMesh` and as groups |
| `replicate`, `shard` | the data axes: DDP, FSDP2 |
| `tensor`; `layouts`, `builtin`, `fit`, `heads`, `sequence`, `local`, `whole` | the tensor axis |
| `pipeline`; `units`, `assign`, `cutting`, `staged` | the pipeline axis: stages of a model |
| `schedule`; `stage`, `activations`, `batches` | the pipeline axis: running them |
| `step`, `gradients` | a batch without a pipeline; accumulation and clipping |
| `checkpoint`; `checkpoint_*` | saving and loading between plans |
| `auto`; `shape`, `measure` | mode auto: a model's sizes, for the search in the core |
"""
