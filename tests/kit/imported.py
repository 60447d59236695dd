"""What whole runs import or make late: in the server from which processes are forked, each of them finds it done."""
# ruff: noqa: F401

import gc

import hypothesis
import openai
import peft
import starlette.applications
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.gemma2.modeling_gemma2
import transformers.models.lfm2.modeling_lfm2
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen3_vl.modeling_qwen3_vl
import uvicorn
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import tests.kit.assets
import tests.kit.workplace

TypeAdapter(ResponseStreamEvent)
get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()  # a collection of a forked process would copy every page of it
