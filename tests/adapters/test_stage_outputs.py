"""The connector's outputs of pipeline stages, with methods of the installed tpu-inference."""

from types import SimpleNamespace

import pytest
from tpu_inference.models.jax.jax_intermediate_tensor import JaxIntermediateTensors
from tpu_inference.runner.tpu_runner import TPUModelRunner
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from tpu_offload.adapters.vllm.stage_outputs import StageOutputs

pytestmark = pytest.mark.vllm


class StandIn:
    """A runner of a stage that is not the last; its steps return what the test says."""

    _continue_decode_output = execute_model_state = None
    sample_tokens = TPUModelRunner.sample_tokens

    def execute_model(self, returned, intermediate_tensors=None):
        return returned

    def get_intermediate_tensor_spec(self, scheduler_output):
        return {"hidden_states": scheduler_output.total_num_scheduled_tokens}


def output(request_id="a"):
    return KVConnectorOutput(finished_recving={request_id})


def activations(kv_output):
    return JaxIntermediateTensors({}, kv_output)


def test_tpu_inference_still_drops_the_output():
    """If this fails, `StageOutputs` has nothing to deliver any more: see docs/upstream."""
    runner = StandIn()
    runner.execute_model(activations(output()))
    assert runner.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT


def test_the_output_of_a_step_comes_with_its_sample():
    runner = StandIn()
    StageOutputs(runner)
    for request_id in ("a", "b"):
        assert isinstance(runner.execute_model(activations(output(request_id))), JaxIntermediateTensors)
        assert runner.sample_tokens(None).kv_connector_output == output(request_id)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None  # it is shared
    runner.execute_model(activations(None))
    assert runner.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT


def test_the_last_stage_and_steps_without_a_forward_pass_are_left_alone():
    runner = StandIn()
    StageOutputs(runner)
    empty = ModelRunnerOutput.with_kv_conn_output_only(output())
    assert runner.execute_model(empty) is empty  # it is delivered itself
    assert runner.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert runner.execute_model(None) is None
    assert runner.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT


def test_a_runner_that_delivers_its_output_is_left_alone():
    runner = StandIn()
    own = ModelRunnerOutput.with_kv_conn_output_only(output("own"))
    runner.sample_tokens = lambda grammar: own
    StageOutputs(runner)
    runner.execute_model(activations(output("kept")))
    assert runner.sample_tokens(None) is own
    assert own.kv_connector_output == output("own")


def test_nothing_is_asked_for_in_a_step_without_a_forward_pass():
    runner = StandIn()
    StageOutputs(runner)
    assert runner.get_intermediate_tensor_spec(SimpleNamespace(total_num_scheduled_tokens=0)) == {}
    assert runner.get_intermediate_tensor_spec(SimpleNamespace(total_num_scheduled_tokens=7)) == {"hidden_states": 7}


def test_close_restores_the_methods_of_the_runner():
    runner = StandIn()
    outputs = StageOutputs(runner)
    runner.execute_model(activations(output()))
    outputs.close()
    assert not vars(runner)
