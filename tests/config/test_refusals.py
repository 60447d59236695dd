"""Settings that are refused: values that mean nothing, and combinations, which break a rule of the table."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from oppo.config.load import overridden, resolve
from oppo.config.settings import RULES, Settings
from oppo.errors import ConfigError
from tests.config.test_extensions import MINE, OWN

MINIMAL: dict[str, Any] = {
    "models": {"policy": "actor"},
    "rewards": [{"source": "reward"}],
    "data": {"prompts": "prompts.jsonl"},
}
SHORT = {
    "AGENT": "agents.program=agent.py:run",
    "EXACT": "run.deterministic=true",
    "TWO": 'placement.trainer=["cuda:1","cuda:2"]',
    "CLUSTER": "placement.cluster=auto",
    "ON_VLLM": "models.engine=vllm",
}


def entries(table: str) -> list[list[str]]:
    """Return the lines of a table, of which an indented one goes on: settings, then what the message says of them."""
    return [re.sub(r"\s+", " ", entry).split(" | ") for entry in re.split(r"\n(?! )", table.strip())]


WRONG = entries("""
environment.tools=a.py:b | environment.tools: expected a list, got 'a.py:b': write ['a.py:b']
run.track=wandb | run.track: expected a list, got 'wandb': write ['wandb']
rewards=[] | [rewards]: expected at least one table, got none
rewards=[1] | [rewards.0]: expected a section with the keys source, name, weight, on_drop, engine,
rewards.0.source=reward.py | 'reward.py' is a file of code: name what scores in it, as file.py:name
environment.source=tool | environment.source: expected '' or file.py:function, got 'tool'
rewards=[{}] | rewards.0.source is missing: directory or hub name of a reward model
rewards.0.weigth=1 | unknown key 'rewards.0.weigth' (did you mean 'weight'?); the keys of [rewards.0] are source, name,
rewards.0.name=a rewards.0.weight="1" rewards.1={source="x.py:f",name="b",timeout=0} |
    2 settings are wrong: | rewards.0.weight: expected a number, got '1' |
    rewards.1.timeout: expected more than 0, got 0
rewards.0.timeout=1 | 'rewards.0.timeout' (it is a key of a reward whose source is a function)
rewards.0.source=x.py:f rewards.0.form=chat | 'rewards.0.form' (it is a key of a reward whose source is a model)
rewards.0.name=a rewards.0.weight=nan | rewards.0.weight: expected a finite number, got nan
rewards.0.weight=2.0 | [rewards.0]: weight = 2.0 is the factor of a term, which has a name
rewards=[{source="x",name="a/b"}] | rewards.0.name: expected letters, digits, '.', '_' and '-' | got 'a/b'
rewards.0.name=a rewards.1.source=x | each with a name, and rewards.1 has none
rewards.0.name=a rewards.1={source="x",name="a"} | another name for each, got 'a' twice
rewards.0.engine=vllm rewards.0.url=http://h rewards.0.vllm.dtype=float32 | [rewards.0] | vllm.dtype is for an engine |
    leave one of the two out
rewards.0.engine=vllm rewards.0.attempts=3 | [rewards.0] | attempts is for a server, and none is named
rewards.0.engine=vllm rewards.0.form=chat | unknown key 'rewards.0.form' | whose source is a model)
rewards.0.engine=vlm | rewards.0.engine: expected 'transformers' or 'vllm' | 'vlm'
rewards.0.engine=vllm rewards.0.vllm=3 | rewards.0.vllm: expected a section, got 3
rewards.0.engine=vllm rewards.0.source=reward.py:score | unknown key 'rewards.0.engine'
scorers.teacher.engine=vllm scorers.teacher.url=http://h scorers.teacher.vllm.dtype=float32 |
    [scorers.teacher] | vllm.dtype is for an engine
scorers.reference.attempts=3 | [scorers.reference] | attempts is for a server, and none is named
scorers.teacher.url=http://h scorers.teacher.engine=transformers | [scorers.teacher] |
    url is for vLLM: set engine = 'vllm'
scorers.teacher.uri=x | unknown key 'scorers.teacher.uri' (did you mean 'url'?) | url, api_key_env,
scorers.teacher.math.engine="vllm" | unknown key 'scorers.teacher.math' | [scorers."teacher.math"] is
scorers.teacher.engine=vlm | scorers.teacher.engine: expected 'transformers' or 'vllm' | 'vlm'
step.algorithm=grpo algorithm.lam=0.9 |
    unknown key 'algorithm.lam' (it is a key of [algorithm] for 'ppo', not for 'grpo'); the keys of
step.algorithm=grpo algorithm.value_clip=none | for 'ppo', not for 'grpo'
step.algorithm=grpo algorithm.samples=1 | algorithm.samples: expected at least 2, got 1
algorithm.scale_scores=mean | for 'grpo', 'dapo', 'gspo', not for 'ppo'
step.algorithm=grpo algorithm.kl_in=reward | [algorithm]: algorithm 'grpo' standardises rewards: where the scores of a |
    put it into the loss, kl_in = 'loss', or take 'rloo'
step.algorithm=grpo algorithm.scale_scores=each_reward algorithm.score_norm=true | score_norm = true chan
step.algorithm=gpro | step.algorithm | did you mean 'grpo'?
step.algorithm=gprpo | step.algorithm | did you mean 'grpo'?
step.algorithm=dpo algorithm.beta=0.1 | step.algorithm: expected 'ppo', 'grpo', | 'distill' or file.py:name, got 'dpo' |
    (did you mean 'dapo'?)
trainer.learning_rate=1 | trainer.learning_rate | 0.1
trainer.critic_learning_rate=0.2 | trainer.critic_learning_rate | 0.1
sampling.temperature=1e-300 | [sampling] | temperature must be 0, which is greedy, or 0.001 to 1000
sampling.temperature=1e300 | [sampling] | temperature must be 0, which is greedy, or 0.001 to 1000
step.lookahead=1000 | step.lookahead | 100
sampling.response_length=64 | (response_length of TRL is sampling.max_new_tokens here)
trainer.betas=[true,0.9] step.overcommit=[true] | 2 settings are wrong: |
    step.overcommit: expected a whole number, got [true]
algorithm.num_generations=4 | (num_generations of TRL is algorithm.samples here)
data.max_prompt_length=64 | (data.max_prompt_length of verl is data.max_prompt_tokens here)
rollout.n=8 | unknown section 'rollout' (actor_rollout_ref.rollout.n of verl is algorithm.samples here)
trainer.disable_dropout=true | (disable_dropout of TRL: Dropout is always off, in all models
models.engine=vlm | models.engine | did you mean 'vllm'?
AGENT agents.program=agent | agents.program | file.py:function
AGENT agents.port=70000 | agents.port
AGENT agents.public_url=machine:8000 | a URL such as http://machine:8000/v1
step.batch=1000000000 | step.batch | 1048576
run.name=LONG | run.name | at most 128 characters
step.bathc=3 | unknown key 'step.bathc' (did you mean 'batch'?); the keys of [step] are algorithm, batch,
trianer.x=1 | unknown section 'trianer' (did you mean 'trainer'?)
step.kl=0.1 | unknown key 'step.kl' (it is a key of [algorithm]); the keys of [step] are
run.steps=0 | run.steps: expected more than 0, got 0
run.steps=true | run.steps: expected a whole number, got true
run.metric_names=wandb | run.metric_names | 'trl' | 'verl'
run.deterministic=yes | run.deterministic: expected true or false, got 'yes'
run.name=a/b | run.name: expected letters, digits
step.chunk=half | step.chunk: expected a whole number or 'whole' or 'tuned', got 'half'
step.batch=4 step.overcommit=5 | overcommit must be at most batch (4), so that overdue rollouts fit; got 5
algorithm.kl_target=3.0 | kl_target and kl_horizon go together
algorithm.kl=0.0 algorithm.kl_target=3.0 algorithm.kl_horizon=9 |
    kl_target adapts the penalty by multiplying it: give kl, where it begins, above 0
algorithm.kl=nan | algorithm.kl: expected a finite number, got nan
algorithm.kl_in=loss | kl_in = 'loss' needs kl_estimator = 'k2' or 'k3'
algorithm.kl_in=loss algorithm.kl_target=3.0 algorithm.kl_horizon=9 |
    kl_target adapts the penalty in the reward: leave it out where kl_in = 'loss'
step.overcommit=2 step.admission=tail-batched |
    admission = 'tail-batched' launches a quarter of the batch more: leave overcommit out
algorithm.score_clip=0 | algorithm.score_clip: expected more than 0, got 0
algorithm.value_clip=off | algorithm.value_clip: expected a number or 'none', got 'off'
sampling.min_new_tokens=200 | [sampling]: min_new_tokens must be at most max_new_tokens (128); got 200
sampling.stop_strings=[""] | sampling.stop_strings: expected item 0 to be text that is not empty, got ''
sampling.stop=3 | sampling.stop: expected a list, got 3
sampling.top_p=0.0 | sampling.top_p: expected more than 0, got 0.0
sampling.stop=[1,2.5] | sampling.stop: expected item 1 to be a whole number or a string, got 2.5
run.directory="" | run.directory: expected text that is not empty, got ''
run.trace=most | run.trace: expected a whole number or 'all', got 'most'
run.trace=-1 | run.trace: expected at least 0 or 'all', got -1
run.cores=100000 | run.cores: expected at most 1024, got 100000
run.steps=1000000000000000000000000000000 | run.steps: expected less than 2147483648, got 1000000
run.watchdog_seconds=1e30 | run.watchdog_seconds: expected less than 2147483648, got 1e+30
algorithm.lam=nan | algorithm.lam: expected a finite number, got nan
trainer.warmup_steps=4 | [trainer]: schedule 'constant' has no warm-up, so warmup_steps cannot be 4: leave it out
run.steps=4 trainer.schedule=linear trainer.warmup_steps=4 |
    [trainer]: warmup_steps must be fewer than the steps of the run (4), not 4
models.device=gpu | models.device: expected 'auto', 'cpu', 'cuda' or one of several as 'cuda:1'
models.lora_sync=adapter models.lora_rank=2 | lora_sync = 'adapter' | engine = 'transformers'
models.lora_sync=adapter ON_VLLM | lora_sync = 'adapter' | set lora_rank or adapter
models.lora_sync=adapter ON_VLLM models.lora_rank=2 models.lora_experts=true | lora_sync = 'adapter' |
    lora_experts = true
models.adapter=old models.lora_rank=2 | leave lora_rank out
models.adapter=old models.lora_alpha=8 | leave lora_alpha out
step.algorithm=own.py:asks | step.algorithm: nothing is given for the parameter 'weather' of
step.algorithm=own.py:recipe algorithm.samples=2.5 | algorithm.samples: expected a whole number
step.algorithm=own.py:recipe algorithm.scale=0 | algorithm.scale: expected more than 0
step.algorithm=own.py:recipe algorithm.tag=1 | unknown key 'algorithm.tag'
step.algorithm=own.py:Trippled | has no 'Trippled'; the functions and classes there are DoubledLoss,
step.algorithm=none.py:Doubled | none.py to take 'Doubled' from
step.algorithm=own.py:Bare | own.py:Bare must be a dataclass, whose fields are the settings of
step.algorithm=own.py:number | own.py:number is not a function but 7 (int)
step.algorithm=own.py:Lacking | own.py:Lacking is no algorithm, since it lacks has_critic, refers,
step.algorithm=own.py:Doubled algorithm.twice=0 | algorithm.twice: expected more than 0
step.algorithm=own.py:Astray | algorithm.twice: expected more than 0, got -2.0
step.algorithm=own.py:Doubled algorithm.twise=1 | 'algorithm.twise' (did you mean 'twice'?)
step.algorithm=own.py:Doubled run.trainer=process | which cannot import DoubledLoss from a file
step.algorithm=dpoo | 'online_dpo', 'rae', 'distill' or file.py:name, got 'dpoo'
step.algorithm=7 | step.algorithm: expected a string, got 7
step.admission=mine.py:Tails admission.share=1.5 | admission.share: expected at most
step.admission=mine.py:Tails admission.shale=1 | unknown key 'admission.shale' (did you mean 'share'?)
step.admission=mine.py:none | mine.py:none makes no admission, since NoneType lacks batch, max_deferrals,
step.admission=mine.py:picky | mine.py:picky raised ValueError: a batch of 32 is too large at
step.admission=mine.py:absent | mine.py has no 'absent'; the functions and classes there are
step.admission=eager | step.admission: expected 'overcommit', 'continuous', 'adaptive',
admission.share=0.5 | [admission]: it holds the settings of a part of your own: name that in
loss.factor=0.5 | [loss]: it holds the settings of a part of your own: name that in step.loss
step.loss=mine.py:clipped algorithm.clip=0.1 algorithm.kl=0.1 algorithm.aggregation=responses |
    which alone reads algorithm.clip, algorithm.aggregation: leave that out, or make it a setting of yours
step.loss=mine.py:Reinforce step.algorithm=grpo algorithm.kl=0.1 | which alone reads algorithm.kl: leave that out
step.loss=mine.py:Reinforce step.algorithm=grpo run.trainer=process | which cannot import Reinforce from a file
step.loss=mine.py:Nothing step.algorithm=grpo trainer.minibatches=4 |
    mine.py:Nothing makes no loss, since Nothing lacks unit, reads, measures,
step.loss=clipped | step.loss: expected '' or file.py:name, got 'clipped'
models.shared_trunk=true models.critic=./other | [models]: shared_trunk = true makes the critic a head on the policy's |
    leave critic out; got './other'
""")

BROKEN = entries("""
environment.source=a.py:b environment.tools=["a.py:b"] | source = 'a.py:b' answers every turn | tools answer calls
environment.source=a.py:b environment.factory=a.py:B | source = 'a.py:b' | environment.factory answers calls
environment.factory=guess | environment.factory: expected file.py:name, or openenv:URL | got 'guess'
environment.factory.one=guess | environment.factory.one: expected file.py:name
environment.tools=["a.py:b"] data.tools=t.json | data.tools = 't.json' shows tools that nothing calls |
    environment.tools
environment.factory=a.py:B environment.process=true | environment.process = true | leave process out
environment.max_turns=3 | environment.max_turns = 3 is for tools
environment.factory=a.py:B environment.compact=9 | environment.compact = 9 is for environment.tools: leave it out
environment.tools=["a.py:b"] environment.max_segments=3 | environment.max_segments = 3 is for environment.compact
environment.tools=["a.py:b"] environment.compact=9 step.admission=tail-batched |
    step.admission = 'tail-batched' begins late ones anew: leave one of the two out
environment.tools=["a.py:b"] environment.compact=9 step.algorithm=online_dpo |
    environment.compact = 9 has rollouts go on in further responses | 'online_dpo'
environment.tools=["a.py:b"] environment.compact=9 step.algorithm=grpo algorithm.credit=turns |
    algorithm.credit = 'turns' compares parts of one response
environment.tools=["a.py:b"] environment.compact=9 data.over_long=truncate |
    data.over_long = 'truncate' leaves prompts that cannot be rendered anew
environment.tools=["a.py:b"] environment.compact=9 step.algorithm=distill teacher.weights=live teacher.column=hint |
    [teacher] has another prompt for one
environment.factory=a.py:B environment.tools_column=t | environment.tools_column = 't' is for environment.tools
environment.source=a.py:b environment.on_failure=answer | environment.on_failure = 'answer' is for tools
environment.tools=["a.py:b"] environment.keep_special_tokens=true |
    environment.keep_special_tokens = true is for text of a function; tools answer by the chat template
data.prompts=verifiers:sums | data.prompts = 'verifiers:sums' is a taskset | set agents.program = 'verifiers'
AGENT eval.prompts=verifiers:sums | eval.prompts = 'verifiers:sums' is a taskset
agents.program=verifiers | data.prompts = 'prompts.jsonl' is none | name one as 'verifiers:NAME'
data.prompts=[{path="a.jsonl",config={n=1}}] | data.prompts[0] = 'a.jsonl' has a config, and only a taskset has one
data.drop_last=true data.prompts=[{path="a.jsonl",weight=1}] |
    data.drop_last is of whole batches from one source, and data.prompts has weights
agents.program=verifiers data.prompts=[{path="verifiers:s",split="x"}] | has a split, and a taskset has no such
agents.program=verifiers data.prompts=[{path="verifiers:s",column="q"}] | has a column, and a taskset has no such
agents.timeout=5 | agents.timeout is of an agent, and agents.program names none
AGENT agents.public_url=http://host/v1 | agents.public_url = 'http://host/v1' | agents.port = 0 is any
AGENT agents.roles={"x/y"="policy"} | agents.roles | letters, digits, '.', '_' and '-' only
AGENT agents.roles={""="policy"} | agents.roles | letters, digits, '.', '_' and '-' only
AGENT agents.roles={one="initial"} | no role that the policy plays, so nothing would be trained
agents.program=verifiers data.prompts=verifiers:sums agents.roles={one="policy"} | know none: leave them out
AGENT EXACT agents.roles={one="policy",two="policy"} | 'one' and 'two' | run.deterministic = true decodes one
AGENT environment.source=a.py:b | agents.program = 'agent.py:run' | leave environment.source out
AGENT environment.tools=["a.py:b"] | agents.program = 'agent.py:run' | leave environment.tools out
AGENT data.tools=tools.json | agents.program = 'agent.py:run' | leave data.tools out
AGENT data.over_long=truncate | data.over_long = 'truncate' | raise data.max_prompt_tokens
AGENT data.column=task | no column holds the prompt: leave column out
AGENT eval.prompts=[{path="a.jsonl",column="task"}] | no column holds the prompt: leave column out
AGENT | agents.program = 'agent.py:run' | leave [[rewards]] out
rewards.0.source=environment | rewards.0.source = 'environment' is what an environment says | give a class or a function
algorithm.over=turns | algorithm.over = 'turns' is of turns, and nothing answers a turn | leave algorithm.over out
step.algorithm=grpo algorithm.credit=state | algorithm.credit = 'state' is of turns | set environment.source
environment.tools=["a.py:b"] step.algorithm=grpo algorithm.credit=state | environment.tools says of none in which state
step.loss=LOSS algorithm.clip=0.3 | step.loss = ' | reads algorithm.clip: leave that out
step.algorithm=distill | algorithm.distill = 1.0 learns | models.teacher names none
algorithm.distill=0.5 | step.algorithm = 'ppo' with algorithm.distill = 0.5 learns | models.teacher names none
models.teacher=large | models.teacher = 'large' | step.algorithm = 'ppo' learns nothing of it: set algorithm.distill
step.algorithm=online_dpo models.teacher=large | learns nothing of it: choose step.algorithm = 'distill'
trainer.optimizer=muon models.lora_rank=4 | trainer.optimizer = 'muon' trains matrices of layers | leave optimizer out
step.algorithm=distill teacher.weights=live | [teacher]: weights = 'live' is the policy | give column or template
step.algorithm=distill models.teacher=large teacher.weights=frozen | models.teacher = 'large' is a teacher, and |
    teacher.weights = 'frozen' makes the policy its own: leave one of the two out
step.algorithm=distill models.teacher=large teacher.rate=0.1 | [teacher]: rate = 0.1 is of weights = 'average', not
step.algorithm=distill models.teacher=large teacher.column=a teacher.template=b | leave one of the two out
step.algorithm=distill models.teacher=large teacher.template="{a-b}" | [teacher]: template: {a-b} is no field: expected
step.algorithm=distill models.teacher=large teacher.template="{0" | [teacher]: template: | expected
step.algorithm=distill models.teacher=large teacher.template="{prompt}" teacher.threshold=1.0 |
    threshold = 1.0 chooses a sibling, and no {sibling} is in template
step.algorithm=distill teacher.weights=frozen teacher.template="{sibling}" |
    {sibling} in teacher.template is another response to the prompt | set algorithm.samples to 2 or more
step.algorithm=distill teacher.weights=frozen teacher.template="{sibling}" algorithm.samples=2 rewards=[] |
    no scores without [[rewards]]: give a reward, or another template
teacher.column=hint | [teacher] has column = 'hint', and step.algorithm = 'ppo' learns nothing of a teacher: set
teacher.weights=frozen | weights = 'frozen', and step.algorithm = 'ppo' learns nothing of a teacher: set algorithm.disti
step.algorithm=distill teacher.weights=live teacher.column=a step.lookahead=1 step.weight_sync=in-flight |
    teacher.weights = 'live' makes them one model: leave one of the two out
AGENT rewards=[] algorithm.distill=1 teacher.weights=frozen teacher.column=a data.column=prompt |
    the conversations of agents.program = | have prompts of their own: leave column and template out
placement.teacher=cpu | placement.teacher = 'cpu' places a teacher, and models.teacher names none
scorers.critic.engine=vllm | [scorers.critic] serves no model of this run: expected reference | correct its name
algorithm.kl=0 scorers.reference.engine=vllm | has neither a reference nor a teacher; name one in models.reference
scorers.reference.engine=vllm models.adapter=old | the reference is the adapter 'old' on the policy's base
scorers.reference.engine=vllm models.quantization=nf4 models.lora_rank=2 | 4 bits (models.quantization = 'nf4') |
    name another model in models.reference
step.algorithm=grpo algorithm.scale_scores=each_reward | algorithm.scale_scores = 'each_reward' | [[rewards]] has one
step.algorithm=distill models.teacher=large rewards=[] eval.prompts=held.jsonl run.keep_best=true |
    eval.prompts and run.keep_best = true is about scores, and there are none without [[rewards]]
EXACT ON_VLLM models.dtype=auto step.admission=adaptive placement.scorers=cuda:1 | run.deterministic = true |
    models.engine = 'vllm', which chooses its batches | step.admission = 'adaptive', which decides by time |
    models.dtype = 'auto': only 'float32' | placement.scorers = 'cuda:1': only 'cpu'
EXACT rewards.0.engine=vllm step.admission=continuous | run.deterministic = true | rewards.0.engine = 'vllm', which |
    step.admission = 'continuous', in which rollouts join others
EXACT scorers.reference.engine=vllm algorithm.kl=0.1 | run.deterministic = true | scorers.reference.engine = 'vllm',
EXACT step.weight_sync=in-flight step.lookahead=1 | run.deterministic = true | step.weight_sync = 'in-flight', which
EXACT models.device=cuda | run.deterministic = true | models.device = 'cuda': only 'cpu' or 'auto'
ON_VLLM run.policy=process | run.policy = 'process' | set models.engine = 'transformers'
ON_VLLM sampling.top_p=0.9 | sampling.top_p = 0.9 | bound them by sampling.top_k too
vllm.max_num_seqs=8 | [vllm] holds max_num_seqs | models.engine = 'transformers'
step.lookahead=1 models.share_weights=true | step.lookahead = 1 | models.share_weights = true |
    leave share_weights out
TWO models.share_weights=true | models.share_weights = true | placement.trainer = ['cuda:1', 'cuda:2'] is not
CLUSTER placement.remote=["teacher"] | placement.remote has 'teacher', and models.teacher names none
CLUSTER placement.remote=["trainer"] | 'trainer', and its first rank is here
CLUSTER placement.remote=["reference"] algorithm.kl=0 | 'reference', and step.algorithm = 'ppo' refers to none
CLUSTER placement.remote=["reward"] rewards.0.source=a.py:b | 'reward', and [[rewards]] names no model that
CLUSTER placement.remote=["reward"] rewards.0.engine=vllm | 'reward', and rewards.0.engine = 'vllm' starts an
CLUSTER placement.remote=["critic"] step.algorithm=grpo | 'critic', and step.algorithm = 'grpo' has none
CLUSTER placement.remote=["critic"] models.shared_trunk=true | 'critic', and models.shared_trunk = true makes
CLUSTER placement.remote=["policy"] models.shared_trunk=true | 'policy', and models.shared_trunk = true makes
CLUSTER placement.remote=["policy"] run.policy=process | 'policy', and run.policy = 'process' serves it
CLUSTER placement.remote=["policy"] ON_VLLM vllm.urls=["http://h:1"] | 'policy', and vllm.urls names the
CLUSTER placement.remote=["reference"] algorithm.kl=0.1 scorers.reference.engine=vllm |
    'reference', and scorers.reference.engine = 'vllm' serves it
CLUSTER placement.remote=["teacher"] algorithm.distill=1 models.teacher=large scorers.teacher.engine=vllm |
    'teacher', and vLLM serves one ([scorers])
CLUSTER TWO | placement.trainer names 'cuda:2', and an actor has the GPU that Ray gives it
models.shared_trunk=true placement.policy=cuda:1 | on 'cuda:1', and models.device = 'auto': set placement.critic =
placement.trainer=["cpu","cuda"] | placement.trainer = ['cpu', 'cuda'] has devices of several kinds
placement.trainer=["cuda:1","cuda:1"] | placement.trainer = ['cuda:1', 'cuda:1'] names a device twice | --ray
CLUSTER rewards.0.source=a.py:b step.algorithm=dapo | placement.cluster is given, and no model of this run
TWO run.trainer=process | run.trainer = 'process' is one process, and placement.trainer has 2 ranks
placement.policy_replicas=2 ON_VLLM vllm.urls=["http://h:1"] |
    placement.policy_replicas = 2 | vllm.urls, which name servers
placement.policy_replicas=2 EXACT | placement.policy_replicas = 2 | run.deterministic = true, and bits
placement.policy_replicas=2 run.policy=process models.shared_trunk=true | placement.policy_replicas = 2 |
    run.policy = 'process', which | models.shared_trunk = true, which
placement.share=sleep | placement.share = 'sleep' | models.engine = 'transformers', which cannot sleep
placement.share=sleep ON_VLLM step.lookahead=1 | step.lookahead = 1, which decodes while the policy is trained
placement.share=sleep ON_VLLM step.kv_on_sync=keep | step.kv_on_sync = 'keep', since an engine that sleeps has
placement.share=sleep ON_VLLM placement.policy_replicas=2 | placement.policy_replicas or placement.remote, since
placement.share=sleep ON_VLLM vllm.urls=["http://h:1"] | vllm.urls, since others start and end servers
step.weight_sync=in-flight | step.weight_sync = 'in-flight' | set step.lookahead to 1 or more
step.weight_sync=in-flight step.lookahead=1 models.shared_trunk=true | step.weight_sync = 'in-flight' |
    models.shared_trunk = true | leave one of the two out
step.stream_updates=true EXACT trainer.epochs=2 trainer.minibatches=2 trainer.router_aux_loss=0.1
    algorithm.score_norm=true algorithm.kl=0.1 algorithm.kl_target=1 algorithm.kl_horizon=9 models.share_weights=true |
    run.deterministic = true, and parts | models.share_weights = true, and gradients | trainer.epochs = 2 |
    trainer.minibatches = 2 | step.algorithm = 'ppo', whose | trainer.router_aux_loss = 0.1 |
    algorithm.score_norm = true | algorithm.kl_target
step.stream_updates=true step.algorithm=dapo trainer.epochs=1 trainer.minibatches=1 algorithm.scale_scores=batch |
    algorithm.scale_scores = 'batch'; algorithm.dynamic_sampling = true: change that
step.stream_updates=true step.algorithm=distill algorithm.samples=2 models.teacher=other trainer.epochs=1 |
    step.algorithm = 'distill', whose advantages are not those of a group alone: change that
step.stream_updates=true step.algorithm=reinforce_pp algorithm.samples=2 trainer.epochs=1 trainer.minibatches=1 |
    step.algorithm = 'reinforce_pp', whose advantages are not those of a group alone: change that
models.lora_experts=true | models.lora_experts would be | models.lora_rank = 0
models.lora={use_rslora=true} | models.lora would be | models.lora_rank = 0
trainer.router_replay=true algorithm.ratio_base=proximal | trainer.router_replay = true | correction for stale tokens
step.loss=LOSS run.trainer=process |
    run.trainer = 'process' takes the loss to another process, which cannot import Mine from a file
step.loss=LOSS placement.trainer=["cpu","cpu"] | placement.trainer, with ranks, takes the loss to another process
eval.every=3 eval.samples=2 | [eval] has every, samples, and nothing is evaluated
step.algorithm=grpo models.critic=other trainer.critic_warmup=1 placement.critic=cuda:1 | 'grpo' has no critic and |
    models.critic = 'other', trainer.critic_warmup = 1, placement.critic = 'cuda:1': leave that out
step.algorithm=grpo models.shared_trunk=true | and cannot use models.shared_trunk = true
trainer.minibatches=5 | trainer.minibatches = 5 does not divide the 32 responses of step.batch = 32 | a divisor
trainer.minibatches=64 step.algorithm=online_dpo | trainer.minibatches = 64 does not divide the 32 groups
trainer.minibatches=3 algorithm.samples=2 | trainer.minibatches = 3 does not divide the 64 responses of step.batch = 32
step.algorithm=dapo step.admission=tail-batched | step.admission = 'tail-batched' | algorithm.dynamic_sampling = true
step.algorithm=rloo sampling.temperature=0 | step.algorithm = 'rloo' takes 8 responses | sampling.temperature = 0 makes
""")

LOSS = "from oppo.losses import PPOLoss\nclass Mine(PPOLoss): pass\ndef made(): return Mine()\n"


def document(folder: Path, chosen: str) -> dict[str, Any]:
    for name, text in {"loss.py": LOSS, "own.py": OWN, "mine.py": MINE}.items():
        (folder / name).write_text(text)
    own = {"step.loss=LOSS": f"step.loss={folder / 'loss.py'}:made", "run.name=LONG": f"run.name={'x' * 300}"}
    short = SHORT | own
    return overridden(MINIMAL, [short.get(each, each) for each in chosen.split(" ")])


@pytest.mark.parametrize(("chosen", "words"), [(chosen, words) for chosen, *words in [*WRONG, *BROKEN]])
def test_what_is_wrong_is_refused_by_its_names(chosen: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(document(tmp_path, chosen), tmp_path)
    assert [each for each in words if each not in str(caught.value)] == []
    assert ("settings are wrong" in str(caught.value)) == any("settings are wrong" in each for each in words)


@pytest.mark.parametrize("rewards", ["reward", {"source": "reward"}])
def test_one_reward_that_is_no_list_is_told_how_a_list_of_them_is_written(rewards: object) -> None:
    with pytest.raises(
        ConfigError, match=r"\[rewards\]: expected tables \[\[rewards\]\], each with a source: .*, got "
    ):
        resolve({**MINIMAL, "rewards": rewards}, Path("/"))


@pytest.mark.parametrize("override", ["algorithm.kl", "kl=1", "=1", "a..c=1", ".kl=1", 'a."b=1', "a.b\nc=1"])
def test_a_malformed_override_says_what_one_looks_like(override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set expects section\.key=value"):
        overridden(MINIMAL, [override])


JUDGE = "rewards=[{source='http://judge/v1', model='m', template='x'}]"
PASTED = entries("""
JUDGE rewards.0.api_key_env=['canary']
JUDGE rewards.0.api_key_env={x='canary'}
JUDGE rewards.0.api_key_env=canary rewards.0.api_key_env.x=1
JUDGE rewards.3.api_key_env=canary
rewards={api_key_env='canary'}
rewards.source=http://judge/v1 rewards.api_key_env=canary
api_key_env=canary
scorers.reference.url=http://judge scorers.reference.engine=vllm scorers.reference.api_key_env=['canary']
scorers.reference=[{api_key_env='canary'}]
""")


@pytest.mark.parametrize("chosen", [chosen for chosen, *_ in PASTED])
def test_a_key_in_the_place_of_its_variable_s_name_is_not_shown(chosen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(overridden(MINIMAL, chosen.replace("JUDGE", JUDGE.replace(" ", "")).split(" ")), Path("/"))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("chosen", ["run.steps=my_env.py:step", "data.tools.x=tool_environment.py"])
def test_a_value_that_is_none_of_a_key_is_shown(chosen: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(chosen.partition("=")[2])):
        resolve(overridden(MINIMAL, [chosen]), Path("/"))


@pytest.mark.parametrize("overrides", ["run.steps=3", {"run.steps": 3}])
def test_overrides_are_a_list(overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r"overrides are a list, such as \['step.batch=16', \.\.\.\]; got "):
        overridden(MINIMAL, overrides)


def test_every_rule_is_broken_by_some_of_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = set[str]()

    def noted(words: str, applies: Callable[[Settings], object]) -> Callable[[Settings], object]:
        def found(settings: Settings) -> object:
            if result := applies(settings):
                broken.add(words)
            return result

        return found

    monkeypatch.setattr(
        "oppo.config.settings.RULES", {words: noted(words, applies) for words, applies in RULES.items()}
    )
    for chosen, *_ in BROKEN:
        with suppress(ConfigError):
            resolve(document(tmp_path, chosen), tmp_path)
    assert broken == RULES.keys()
