"""What whole runs import late: modules for the server from which processes are forked."""
# ruff: noqa: F401

import openai
import peft
import starlette.applications
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.gemma2.modeling_gemma2
import transformers.models.lfm2.modeling_lfm2
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import uvicorn

import tests.kit.assets
import tests.kit.workplace
