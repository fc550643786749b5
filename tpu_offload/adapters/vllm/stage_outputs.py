"""Delivers what the connector reports on pipeline stages, which tpu-inference 0.32 drops on all stages but the last.

In a step with a forward pass, the runner of such a stage returns the connector's output with its activations. The
worker sends the activations to the next stage and returns nothing, and `sample_tokens` returns an empty output. So
saves would never be acknowledged, and loads never reported. `StageOutputs` keeps the output until `sample_tokens`,
where vLLM's `KVOutputAggregator` joins it with those of the other stages.

In a step without one (nothing to compute while copies or loads are in flight), every stage reports. But each stage
after the first asks its predecessor for activations that this never sends, and the request stays pending forever.
`StageOutputs` has it ask for nothing.

docs/upstream has the changes to tpu-inference that make this unnecessary. With them, it changes nothing.
"""

from typing import Any, final

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


@final
class StageOutputs:
    """The outputs of one stage's model runner. All calls come from the thread that runs the model.

    Args:
      runner: tpu-inference's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._output: KVConnectorOutput | None = None  # of the step whose `sample_tokens` has not been called
        self._originals = {
            name: getattr(runner, name) for name in ("execute_model", "sample_tokens", "get_intermediate_tensor_spec")
        }
        runner.execute_model = self._execute_model
        runner.sample_tokens = self._sample_tokens
        runner.get_intermediate_tensor_spec = self._get_intermediate_tensor_spec

    def close(self) -> None:
        """Restores the runner's own methods."""
        for name in self._originals:
            delattr(self._runner, name)
        self._originals.clear()

    # These replace methods of the runner.

    def _execute_model(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._originals["execute_model"](*args, **kwargs)
        if returned is not None and not isinstance(returned, ModelRunnerOutput):  # activations
            self._output = getattr(returned, "kv_connector_output", None)
        return returned

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        sampled = self._originals["sample_tokens"](*args, **kwargs)
        output, self._output = self._output, None
        if output is None or getattr(sampled, "kv_connector_output", None) is not None:
            return sampled
        return ModelRunnerOutput.with_kv_conn_output_only(output)

    def _get_intermediate_tensor_spec(self, scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return {}
        return self._originals["get_intermediate_tensor_spec"](scheduler_output)
