"""100 strings with a secret and 100 without, as settings, logs and reports have them.

Not independent of the rules: the author of the rules wrote them, and changed both after looking at what was missed.

The secrets are made up anew from a seed, so that no scanner takes this file for a leak; `{name}` is one of `SECRETS`.
"""

from __future__ import annotations

import random
import string

HEX, ALNUM, LOWER = "0123456789abcdef", string.ascii_letters + string.digits, string.ascii_lowercase
URL_SAFE = ALNUM + "-_"

# name: prefix, alphabet, length
SECRETS = {
    "hf": ("hf_", string.ascii_letters, 34),
    "openai": ("sk-proj-", URL_SAFE, 60),
    "anthropic": ("sk-ant-api03-", URL_SAFE, 60),
    "groq": ("gsk_", ALNUM, 52),
    "xai": ("xai-", ALNUM, 60),
    "nvidia": ("nvapi-", URL_SAFE, 60),
    "replicate": ("r8_", ALNUM, 37),
    "github": ("ghp_", ALNUM, 36),
    "github_fine": ("github_pat_", ALNUM, 60),
    "gitlab": ("glpat-", ALNUM, 20),
    "slack": ("xoxb-", string.digits, 40),
    "aws_id": ("AKIA", string.ascii_uppercase + string.digits, 16),
    "aws": ("", ALNUM + "/+", 40),
    "google": ("AIza", URL_SAFE, 35),
    "google_oauth": ("ya29.", URL_SAFE, 60),
    "pypi": ("pypi-AgEIcHlwaS5vcmc", URL_SAFE, 70),
    "npm": ("npm_", ALNUM, 36),
    "docker": ("dckr_pat_", ALNUM, 27),
    "stripe": ("sk_live_", ALNUM, 24),
    "sendgrid": ("SG.", URL_SAFE, 22),
    "databricks": ("dapi", HEX, 32),
    "vault": ("hvs.", URL_SAFE, 40),
    "wandb": ("", HEX, 40),
    "hex32": ("", HEX, 32),
    "hex64": ("", HEX, 64),
    "alnum40": ("", ALNUM, 40),
    "alnum20": ("", ALNUM, 20),
    "base64": ("", ALNUM + "+/", 86),
    "word": ("", LOWER, 9),
    "pass": ("", ALNUM + "!#%^*", 14),
    "at": ("p@", ALNUM, 5),
    "tail": ("ss@", ALNUM, 6),
}

PLANTED = """
HF_TOKEN={hf}
export HF_TOKEN='{hf}'
login with {hf}
huggingface-cli login --token {hf}
run_name: qwen-{hf}-v2
"run_name": "grpo_{hf}"
run_name=sweep-{github}
"run_name": "exp1 {openai}"
run {alnum40} of the sweep
OPENAI_API_KEY={openai}
openai.api_key = "{openai}"
ANTHROPIC_API_KEY: {anthropic}
judge = Judge(key="{anthropic}")
using {groq} for the judge
XAI {xai}
{{"nvidia": "{nvidia}"}}
replicate {replicate}
git clone https://{github}@github.com/me/private
git clone https://x-access-token:{github}@github.com/me/private
fatal: could not read from https://{alnum20}@git.example/me/repo
pip install git+https://{github_fine}@github.com/me/private@main
GITLAB_TOKEN={gitlab}
slack token {slack}
https://hooks.slack.com/services/T01ABCDEF/B02ABCDEF/{alnum20}
"slack_url": "https://hooks.slack.com/services/T01ABCDEF/B02ABCDEF/{alnum20}"
{{"url": "https:\\/\\/hooks.slack.com\\/services\\/T01ABCDEF\\/B02ABCDEF\\/{alnum20}"}}
https://discord.com/api/webhooks/112233445566/{alnum40}
https://me.webhook.office.com/webhookb2/{hex32}
POST https://hooks.zapier.com/hooks/catch/123456/{alnum20}/
https://api.telegram.org/bot6549927901:AA{alnum40}/sendMessage
AWS_ACCESS_KEY_ID={aws_id}
aws: {aws}
"aws_secret_access_key": "{aws}"
s3://{aws_id}:{alnum40}@bucket/model
GOOGLE_API_KEY={google}
token {google_oauth} expired
TWINE_PASSWORD={pypi}
//registry.example/:_authToken={npm}
docker login -u me -p {docker}
stripe {stripe}
SENDGRID={sendgrid}.{alnum40}
DATABRICKS_HOST=x token={databricks}
VAULT_TOKEN={vault}
wandb: {wandb}
WANDB_API_KEY={wandb}
my password is {word}
api_key={hex32}
"api-key": "{hex32}"
X-Api-Key: {hex32}
headers={{'X-Api-Key': '{hex32}'}}
headers = {{"Authorization": "Bearer {alnum40}"}}
Authorization: Bearer {alnum20}
authorization: bearer {word}
"Authorization": "Basic {alnum20}=="
Authorization: token {hex32}
('Authorization', 'Bearer {alnum20}')
b'Authorization': b'Bearer {alnum20}'
{{\\"Authorization\\": \\"Bearer {alnum20}\\"}}
curl -H "Authorization: Bearer {alnum20}" http://localhost:8000
the key is {hex32}
Cookie: session={alnum20}; theme=dark
Set-Cookie: id={alnum20}; HttpOnly
jwt eyJhbGciOiJIUzI1NiJ9.eyJ{alnum20}.{alnum40}
"jwt": "eyJhbGciOiJIUzI1NiJ9.eyJ{alnum20}.{alnum40}"
vllm_server_base_url: http://me:{pass}@host:8000
"vllm_server_base_url": "https://me:{word}@host.example/v1"
http://:{word}@localhost:6379/0
mysql -u me -p{word} runs
postgres://me:{at}{tail}@db.example/runs
postgres://me:{at}/{tail}@db.example/runs
https://me@corp.example:{word}@host.example/repo
mongodb+srv://me:{pass}@cluster.example/?retryWrites=true
connect("me", "{word}")
{{"url": "https:\\/\\/me:{word}@host.example"}}
proxies: {{'https': 'http://me:{pass}@proxy:3128'}}
password: {word}
password = '{pass}'
"password": "{word} {word}"
{{\\"password\\": \\"{pass}\\"}}
"{{\\"model\\": {{\\"api_key\\": \\"{alnum20}\\"}}}}"
Server=db;User=me;Pwd={pass};Timeout=5
pwd={word}
db_pwd: {word}
passwd={at}{tail}
MYSQL_PASS={word}
--password {word}
--api-key={alnum20}
['--hub-token', '{alnum20}']
hub_token='{alnum20}'
model_init_kwargs: {{'token': '{alnum20}', 'revision': 'main'}}
chat_template_kwargs={{"secret": "{word}"}}
client_secret={alnum20}
<password>{word}</password>
machine host.example login me password {word}
curl -u me:{word} https://host.example
https://bucket.example/model?X-Amz-Signature={hex64}&x=1
https://account.blob.example/c?sv=2024&sig={alnum40}%3D
https://host.example/v1?api_key={alnum20}&model=x
AccountName=me;AccountKey={base64}==;EndpointSuffix=x
-----BEGIN PRIVATE KEY-----\\n{base64}\\n-----END PRIVATE KEY-----
"""

HARMLESS = """
tokens: 123456, completions/mean_length: 37.5
{"num_tokens": 1234567.0, "step": 3}
run d00d78ab1898, 12 tokens a completion, the token limit is 4096 tokens
0000000042.a00_pending.safetensors
https://github.com/trl@main and me@corp.example
outputs/hf_gsm8k_baseline
https://github.com/huggingface/trl/issues/1
File "/home/me/rewards.py", line 3 in accuracy
step 50/100 reward 0.969  854 rollouts/s
torch==2.13.0+cpu
tokenizer_name_or_path: gpt2
"tokenizer_class": "Qwen2TokenizerFast"
TOKENIZERS_PARALLELISM=false
tokenizers==0.21.4
"eos_token": "<|im_end|>"
pad_token='<pad>'
"bos_token": null, "unk_token": "[UNK]"
"max_tokens": 512, "truncate_prompt_tokens": 1024
hub_token=None
"push_to_hub_token": null
use_auth_token: false
token_type_ids=[0, 0, 1]
author: Jane Doe
"author": "Jane Doe", "authors": ["Jane Doe"]
the authority of the checkpoint is its hash
AuthenticationError: invalid request
KeyError: 'prompt'
TokenizationError: unknown symbol
PasswordError: too short
basic training of the sampler ends
bearer instruments are out of scope
sort_key=accuracy
primary_key: question_id
"key": "question"
lambda row: row["key"]
for key, value in items
group_by_key: prompt
dataset_key="answer"
key=len
learning_rate: 1e-06, max_grad_norm: 0.2
"model": "Qwen/Qwen2.5-0.5B-Instruct"
model=unsloth/Qwen2.5-Coder-32B-Instruct-GPTQ-Int4-v2024
meta-llama/Llama-3.3-70B-Instruct
run_name: qwen-grpo-lr1e-6-seed42
"run_name": "2026-11-22_17-20-35_sweep-3"
output_dir=/home/me/outputs/run-3/checkpoint-1000
PWD=/home/me/project
OLDPWD=/tmp
PATH=/usr/local/bin:/usr/bin:/bin
LD_LIBRARY_PATH=/usr/local/cuda/lib64
CUDA_VISIBLE_DEVICES=0,1,2,3
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
NCCL_DEBUG=INFO
http://localhost:8000/v1/completions
"vllm_server_base_url": "http://10.0.0.7:8000"
http://127.0.0.1:6006/#scalars
ssh://git@github.com/me/repo.git
git@github.com:me/repo.git
https://huggingface.co/datasets/openai/gsm8k/resolve/main/README.md?download=true
https://host.example/v1/models?limit=10&order=asc
https://docs.python.org/3/library/re.html#re.sub
s3://bucket/model/step-1000
file:///home/me/run/worker
token=os.environ["HF_TOKEN"]
password = getpass()
api_key=args.api_key
token=token
headers = {"Authorization": f"Bearer {token}"}
Authorization: $AUTH
export HF_TOKEN=$(cat ~/.token)
password: ********
api_key=<your key>
OPENAI_API_KEY={{ key }}
def login(token: str, password: str) -> None:
secrets are removed from this file
the cookie jar is empty
password authentication is off
the secret of a good reward is its scale
--max-tokens 512 --seed 3
--tokenizer gpt2
'--token-limit', '4096'
commit d1949ff of main
0x7f3a2b4c5d6e
uuid 123e4567-e89b-12d3-a456-426614174000
boot id 6f1c2a9e-0d3b-4e57-8a3c-1f2e3d4c5b6a
2026-11-22T17:20:35+00:00
GPU-8f3e2d1c-4b5a-6978-8796-a5b4c3d2e1f0
sha256 of 3 shards
Qwen2ForCausalLMWithValueHead
AsyncGRPOTrainerWithRemoteWeightsExporter
completions/mean_terminated_length
rewards/accuracy_reward/mean 0.53125
loss_type=dapo, scale_rewards=group, beta=0.0
<think>42 is 6 * 7</think><answer>42</answer>
print(sum(n * n for n in range(1000)))
What is the key to a fair game? It is trust.
assistant: The password to the vault is not known.
grad_norm: 0.11240234375, entropy: 1.8671875
me@corp.example asked at 10:30
the password of the demo is in no file of it
"""


def planted() -> list[tuple[str, list[str]]]:
    """Each string, and the secrets in it, without what is the same in all of their kind."""
    source = random.Random(20261122)
    found = []
    for template in PLANTED.strip().splitlines():
        secrets: list[str] = []
        text = template
        for name, (prefix, alphabet, length) in SECRETS.items():
            while "{" + name + "}" in text:
                secret = "".join(source.choices(alphabet, k=length))
                secrets.append(secret)
                text = text.replace("{" + name + "}", prefix + secret, 1)
        found.append((text.replace("{{", "{").replace("}}", "}"), secrets))
    return found


def harmless() -> list[str]:
    return HARMLESS.strip().splitlines()
