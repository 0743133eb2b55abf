"""Bad input on the command line: exit code 2 and one sentence with cause and fix on stderr, nothing
on stdout, no traceback, no raw warning.
"""

import argparse
import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.cli import parser
from wassail.cli.parser import main

MINE = """
import torch, wassail.zoo.digits
def net(): return wassail.zoo.digits.ARCHITECTURES["mlp"]()
def wants(width, depth): return None
def boom(): raise RuntimeError("no weights here")
def keys(): raise KeyError("w")
def none(): return None
def number(): return 3
def leaves(): raise SystemExit(3)
def forward():
    def f(x): raise ZeroDivisionError("division by zero")
    return f
def flat(inputs, outputs): return torch.nn.Sequential(torch.nn.Flatten(),
                                                      torch.nn.Linear(inputs, outputs))
def tanh(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10),
                                       torch.nn.Tanh())
def log_softmax(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10),
                                              torch.nn.LogSoftmax(1))
def rgb(): return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(),
                                      torch.nn.Linear(144, 10))
def nan():
    model = flat(64, 10)
    model[1].bias.data[0] = float("nan")
    return model
def one(): return flat(64, 1)
def double():
    model = flat(64, 10).double()
    return lambda x: model(x.double())
def half(): return flat(64, 10).half()
def pair():
    model = flat(64, 10)
    return lambda x: (model(x), 1)
def last(): return torch.ones(3, 8, 8, 3), torch.tensor([0, 1, 2])
def no_samples(): return torch.ones(0, 1, 8, 8), torch.ones(0).long()
def samples(): return torch.ones(3, 1, 8, 8)
def disk(): raise OSError("disk")
value = 3
"""


CONFIGS = {
    "open": "eps = [\n",
    "misspelt": 'model = "digits-mlp"\nepss = 0.1\n',
    "table": 'model = "digits-mlp"\neps = {a = 1}\n',
    "yes": 'model = "digits-mlp"\neps = 0.1\nresume = "yes"\n',
    "fraction": 'model = "digits-mlp"\neps = 0.1\nseed = 1.5\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bad")
    x, y = (t.numpy()[:12] for t in ws.zoo.data())
    arrays = {
        "good": {"x": x, "y": y},
        "empty": {"x": x[:0], "y": y[:0]},
        "fewer-labels": {"x": x, "y": y[:4]},
        "twice": {"x": 2 * x - 0.5, "y": y},
        "rgb": {"x": np.repeat(x, 3, 1), "y": y},
        "no-labels": {"x": x},
        "halves": {"x": x, "y": y + 0.5},
        "negative": {"x": x, "y": y.astype(int) - 5},
        "one-hot": {"x": x, "y": np.eye(10)[y]},
        "words": {"x": x, "y": np.array(list("abcdefghijkl"))},
    }
    for name, content in arrays.items():
        np.savez(found / f"{name}.npz", **content)
    whole = (found / "good.npz").read_bytes()
    (found / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (found / "zero.npz").write_bytes(b"")
    (found / "bad.csv").write_text("a,b,label\n1,oops,0\n2,3,1\n")
    (found / "empty.csv").write_text("")
    (found / "text.txt").write_text("hello")
    (found / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    torch.save(ws.zoo.load("digits-mlp"), found / "module.pt")
    torch.save({"a": 1}, found / "dict.pt")
    torch.save(torch.ones(3), found / "tensor.pt")
    (found / "object.pkl").write_bytes(pickle.dumps({"a": 1}))
    (found / "theirs.py").write_text(MINE)
    (found / "broken.py").write_text("def net(:\n")
    for name in ("nothing", "half"):
        (found / name).mkdir()
    (found / "half" / "config.json").write_text("{")
    torch.save(torch.from_numpy(x)[:5], found / "few.pt")
    for name, text in CONFIGS.items():
        (found / f"{name}.toml").write_text(text)
    (found / "short.csv").write_text("feature,low\na,0\n")
    (found / "box.csv").write_text("feature,low,high\na,0,1\n")
    return found


def on(data: str) -> str:
    return f"evaluate digits-mlp --eps 0.1 --attacks fgsm --order inf --data {data}"


def of(model: str) -> str:
    return f"evaluate {model} --eps 0.1 --attacks fgsm --order inf --data good.npz"


def word(rest: str) -> str:
    return f"{of('digits-mlp')} {rest}"


CASES = {
    "no samples": (on("empty.npz"), "'empty.npz' holds no samples"),
    "no samples of a factory": (on("theirs:no_samples"), "holds no samples"),
    "truncated": (on("cut.npz"), "cannot read data from 'cut.npz'"),
    "zero bytes": (on("zero.npz"), "cannot read data from 'zero.npz'"),
    "no labels": (on("no-labels.npz"), "'no-labels.npz'"),
    "labels with halves": (on("halves.npz"), "'halves.npz'"),
    "negative labels": (on("negative.npz"), "the labels range over"),
    "one-hot labels": (on("one-hot.npz"), "give class indices"),
    "labels in words": (on("words.npz"), "y.npy in words.npz"),
    "csv": (on("bad.csv"), "bad.csv"),
    "empty csv": (on("empty.csv"), "empty.csv"),
    "text": (on("text.txt"), "text.txt"),
    "empty folder": (on("nothing"), "nothing"),
    "no such folder": (on("no/where"), "no/where"),
    "data factory None": (on("theirs:none"), "theirs:none"),
    "data without labels": (on("theirs:samples"), "(sample, label)"),
    "data factory fails": (on("theirs:disk"), "disk"),
    "data value": (on("theirs:value"), "theirs:value"),
    "cifar": (on("cifar"), "'cifar'"),
    "grey as RGB": (of("theirs:rgb"), "does not accept samples of shape"),
    "RGB as grey": (on("rgb.npz"), "does not accept samples of shape"),
    "factory with arguments": (of("theirs:wants"), "missing 2 required positional arguments"),
    "factory fails": (of("theirs:boom"), "RuntimeError: no weights here"),
    "factory without key": (of("theirs:keys"), "KeyError: 'w'"),
    "factory None": (of("theirs:none"), "returned a NoneType"),
    "factory number": (of("theirs:number"), "returned a int"),
    "factory leaves": (of("theirs:leaves"), "SystemExit"),
    "syntax": (of("broken:net"), "cannot load model 'broken:net'"),
    "too many arguments": (of("theirs:net(1,2)"), "cannot load model 'theirs:net(1,2)'"),
    "code": (of("theirs:net(__import__('os'))"), "unknown model"),
    "no factory": (of("theirs:"), "unknown model 'theirs:'"),
    "forward fails": (of("theirs:forward"), "with ZeroDivisionError: division by zero"),
    "NaN weights": (of("theirs:nan"), "NaN or infinity"),
    "two classes": (of("theirs:flat(64,2)"), "the model has 2 classes"),
    "one logit": (of("theirs:flat(64,1)"), "the model has one output"),
    "pickled module": (of("theirs:net") + " --weights module.pt", "module.pt"),
    "dict of numbers": (of("theirs:net") + " --weights dict.pt", "dict.pt"),
    "one tensor": (of("theirs:net") + " --weights tensor.pt", "tensor.pt"),
    "pickle": (of("theirs:net") + " --weights object.pkl", "object.pkl"),
    "cut weights": (of("theirs:net") + " --weights cut.safetensors", "cut.safetensors"),
    "folder of weights": (of("theirs:net") + " --weights nothing", "nothing"),
    "no onnx": (of("no.onnx"), "no.onnx"),
    "weights as a model": (of("module.pt"), "holds weights but no architecture"),
    "robustbench": (of("robustbench:Nobody2024"), "Nobody2024"),
    "order w1": (word("--order w1"), "order 'w1' is not a number"),
    "order 0": (word("--order 0"), "order '0' is below 1"),
    "order nan": (word("--order nan"), "order 'nan'"),
    "norm l7": (word("--norm l7"), "norm 'l7' is not supported"),
    "norm in words": (word("--norm euclid"), "norm 'euclid' is not supported"),
    "eps beyond the box": (word("--eps 8"), "give a smaller eps (8/255, not 8)"),
    "eps nan": (word("--eps nan"), "eps 'nan' is not a number"),
    "eps inf": (word("--eps inf"), "a budget must be positive and finite"),
    "eps 1/0": (word("--eps 1/0"), "eps '1/0' is not a number"),
    "eps percent": (word("--eps 3%"), "eps '3%' is not a number"),
    "eps comma": (word("--eps 0,1"), "eps '0,1' is not a number"),
    "eps too small": (word("--eps 1e-400"), "a budget must be positive"),
    "unknown shift": (word("--eps fog-3"), "unknown shift 'fog-3'"),
    "n beyond the data": (word("-n 500"), "'good.npz' has 12 samples"),
    "n negative": (word("-n -3"), "-n is -3"),
    "n in words": (word("-n all"), "invalid int value: 'all'"),
    "n with a half": (word("-n 2.5"), "invalid int value: '2.5'"),
    "domain": (word("--domain a b"), "domain 'a' is not a number"),
    "domain empty": (word("--domain 0 0"), "is empty"),
    "domain too small": (word("--domain 0 0.5"), "the domain is [0, 0.5]"),
    "passes 0": (word("--attacks nearest --passes 0"), "passes is 0"),
    "passes 2.5": (word("--passes 2.5"), "'2.5' (a whole number, or auto)"),
    "batch 0": (word("--batch-size 0"), "batch_size is 0"),
    "chunk 0": (word("--chunk 0"), "chunk is 0"),
    "seed": (word("--seed a"), "invalid int value: 'a'"),
    "threads": (word("--threads 9999"), "--threads is 9999"),
    "time negative": (word("--certify --time-limit=-3"), "the time limit is '-3'"),
    "time in words": (word("--certify --time-limit soon"), "time limit 'soon' is not a number"),
    "mean of two": (word("--mean 0.1 0.2 --std 1 1"), "mean and std have 2 numbers"),
    "std 0": (word("--std 0"), "std is 0.0: give finite numbers, all positive"),
    "mean and std differ": (word("--mean 0.1 0.2 --std 1 2 3"), "mean has 2 numbers and std 3"),
    "mean nan": (word("--mean nan"), "mean 'nan' is not a number"),
    "topk 0": (word("--attacks wda:topk=0 --order 1"), "topk is 0"),
    "kappa": (word("--attacks wda:kappa=0.5 --order 1"), "kappa is 0.5"),
    "attack option": (word("--attacks wda:foo=3"), "'wda' has no option 'foo'"),
    "half an option": (word("--attacks wda:kappa"), "write wda:option=value"),
    "no option": (word("--attacks pgd:progress=1 --order inf"), "which a run gives it"),
    "step 0": (word("--attacks wda:step=0 --order 1"), "step is 0"),
    "logits": (word("--logits foo"), "which has no 'foo'"),
    "one logit of ten": (word("--one-logit"), "--one-logit is for models with one output"),
    "add without out": (word("--add-attack pgd"), "need --out"),
    "gpus": (word("--ray gpus=many"), "gpus of --ray 'many' is not a number"),
    "requirement": (word('--require "be good"'), "be good"),
    "proof": (
        word('--require "accuracy>=0.5 at eps 0.1 order 1 proved"'),
        "needs a proof: add --certify",
    ),
    "percent": (
        word('--require "accuracy>=50 at eps 0.1 order inf attacked"'),
        "accuracies are fractions here",
    ),
    "name": (word('--name ""'), "name is ''"),
    "out is a file": (word("--out good.npz"), "cannot write to 'good.npz'"),
    "out empty": (word('--out ""'), "--out is empty"),
    "device": (word("--device tpu"), "cannot use device 'tpu'"),
    "arithmetic": (word("--certify arithmetic=fast"), "unknown arithmetic 'fast'"),
    "no attack": ("evaluate digits-mlp --eps 0.1 --attacks", "expected at least one argument"),
    "no eps": ("evaluate digits-mlp", "required: --eps; see `wassail evaluate --help`"),
    "unknown option": (word("--foo"), "unrecognized arguments: --foo"),
    "unknown command": ("evaluat", "invalid choice: 'evaluat'"),
    "no model": ("evaluate --eps 1", "required: model"),
    "report": ("report nowhere", "holds no run"),
    "report of nothing": ("report nothing", "holds no run"),
    "report of a half": ("report half", "half"),
    "report of a file": ("report good.npz", "good.npz"),
    "compare": ("compare nowhere", "holds no run"),
    "compare nothing": ("compare", "required: RUN"),
    "export": ("export nowhere csv", "holds no run"),
    "export format": ("export nothing docx", "unknown format 'docx'"),
    "verify": ("verify nowhere digits-mlp", "holds no run"),
    "verify share": ("verify nothing digits-mlp --radii 2", "--radii is '2'"),
    "verify share in words": ("verify nothing digits-mlp --radii some", "--radii 'some'"),
    "certify loss": ("certify digits-mlp --loss mse", "unknown loss 'mse'"),
    "certify dlr": ("certify digits-mlp --loss dlr", "not Lipschitz"),
    "certify slopes": ("certify digits-mlp --slopes foo", "unknown slope 'foo'"),
    "certify radius": ("certify digits-mlp --radius=-1", "eps is '-1'"),
    "certify eps": ("certify digits-mlp --eps 0", "eps is '0'"),
    "certify norm": ("certify digits-mlp --norm 4", "norm '4' is not supported"),
    "certify no samples": ("certify digits-mlp --data empty.npz", "'empty.npz' holds no samples"),
    "certify n": ("certify digits-mlp --data good.npz -n 99", "has 12 samples"),
    "certify domain": ("certify digits-mlp --domain 2 1", "is empty"),
    "figures": ("paper figures fig99", "unknown figure 'fig99'"),
    "figures norm": ("paper figures --norm 3", "norm '3' is not supported"),
    "table": ("paper table digit --out t1", "digit"),
    "table norm": ("paper table digits-mlp --norm 5", "norm '5' is not supported"),
    "table eps": ("paper table digits-mlp --eps 1 2 3 --out t2", "3 budgets for 2 norms"),
    "table attacks": ("paper table digits-mlp --attacks foo --out t3", "foo"),
    "table n": ("paper table digits-mlp -n 0 --out t4", "-n is 0"),
    "paper": ("paper", "required: WHAT"),
    "demo": ("demo nosuch", "unknown model 'nosuch'"),
    "demo eps": ("demo --eps x", "eps 'x' is not a number"),
    "points of others": (word("--points few.pt"), "the points have shape (5, 1, 8, 8)"),
    "points nowhere": (word("--points no.pt"), "cannot read points from 'no.pt'"),
    "points of a folder": (word("--points nothing"), "cannot read points from 'nothing'"),
    "points of a table": (word("--points bad.csv"), "it is no file of torch.save"),
    "points of a module": (word("--points module.pt"), "it holds more than tensors"),
    "config is cut": ("evaluate --config open.toml", "'open.toml' is no TOML file"),
    "config misspelt": ("evaluate --config misspelt.toml", "did you mean 'eps'"),
    "config table": ("evaluate --config table.toml", "eps in 'table.toml' is {'a': 1}"),
    "config yes": ("evaluate --config yes.toml", "resume in 'yes.toml' is 'yes'"),
    "config fraction": ("evaluate --config fraction.toml", "seed in 'fraction.toml' is 1.5"),
    "config nowhere": ("evaluate --config no.toml", "`wassail init no.toml` writes a file"),
    "config folder": ("evaluate --config nothing", "cannot read a configuration from 'nothing'"),
    "init over a file": ("init table.toml", "'table.toml' is there already"),
    "init nowhere": ("init no/where.toml", "cannot write 'no/where.toml'"),
    "completion": ("completion tcsh", "invalid choice: 'tcsh'"),
    "board": ("board nowhere", "'nowhere' holds no run"),
    "board of nothing": ("board", "required: RUN"),
    "effort alone": (word("--effort 1"), "together with --certify"),
    "effort": (word("--certify --effort=-1"), "effort is -1"),
    "gap alone": (word("--gap 1"), "together with --certify"),
    "gap": (word("--certify --gap 200"), "gap is 2, 200 points"),
    "smooth": ("smooth digits-mlp --sigma 0.1", "evaluate --smooth SIGMA"),
    "smooth sigma": ("evaluate digits-mlp --smooth 0", "sigma is '0'"),
    "smooth draws": ("evaluate digits-mlp --smooth 0.1:draws=7", "draws is 7"),
    "smooth confidence": ("evaluate digits-mlp --smooth 0.1:confidence=95", "confidence is '95'"),
    "smooth norm": ("evaluate digits-mlp --smooth 0.1 --norm inf", "leave --norm away"),
    "smooth eps": ("evaluate digits-mlp --smooth 0.1 --eps=-1", "eps is '-1'"),
    "draws alone": (word("--draws 100"), "give --smooth SIGMA:draws=VALUE"),
    "confidence alone": (word("--confidence 0.9"), "--confidence is gone: give --smooth"),
    "workers alone": (word("--workers 3"), "give --ray workers=VALUE"),
    "chunk timeout alone": (word("--chunk-timeout 3"), "give --ray timeout=VALUE"),
    "box": (word("--box short.csv"), "'short.csv' has no high"),
    "box for images": (word("--box box.csv"), "samples of shape (F,)"),
    "ids": (word("--data digits:ids=text.txt"), "for folders of images"),
    "setting": (word("--ray auto:workers=2,gpu=1"), "known are workers, gpus, timeout"),
    "other setting": (word("--certify auto:arithmetics=exact"), "known are arithmetic"),
    "write": (word("--write no/where.xml"), "cannot write 'no/where.xml'"),
    "write what": (word("--write card.txt"), "unknown ending of a file '.txt'"),
    "junit": (word("--junit where.xml"), "--junit is gone: give --write FILE.xml"),
    "kappa of before": (word("--kappa 3"), "give --attacks wda:kappa=VALUE"),
    "gradients": (word("--gradients int8"), "unknown precision 'int8'"),
    "attacks with a comma": (word("--attacks fgsm,pgd"), "unknown attack 'fgsm,pgd'"),
    "norm with a comma": (word("--norm 1,2"), "norm '1,2' is not supported"),
    "no name": ('evaluate "" --eps 0.1', "unknown model ''"),
    "requirement eps": (word('--require "accuracy>=0.5 at eps x order inf attacked"'), "eps 'x'"),
    "requirement empty": (word('--require ""'), "cannot read the requirement ''"),
    "one output": (of("theirs:one"), "add --one-logit"),
    "float64 inside": (of("theirs:double"), "answers float32 samples in float64: save the samples"),
    "half": (of("theirs:half"), "in half precision (float16)"),
    "pair": (of("theirs:pair"), "--logits 0"),
    "pair, certified": (of("theirs:pair") + " --certify", "--logits 0"),
    "channels last": ("evaluate theirs:rgb --data theirs:last --eps 0.1", "channels last (NHWC)"),
    "channels last, certify": ("certify theirs:rgb --data theirs:last", "channels last (NHWC)"),
    "beyond the box": (on("twice.npz"), "has --box FILE"),
    "empty box": (word("--domain 1 0"), "--domain LOW HIGH with LOW below HIGH, or --no-box"),
    "executed": (
        of("theirs:tanh") + " --certify arithmetic=executed",
        "use --certify METHOD:arithmetic=exact",
    ),
    "log-softmax": ("certify theirs:log_softmax -n 2 --eps 0.1", "--slopes infinity anchor margin"),
    "box of certify": ("certify digits-mlp -n 2 --eps 0.1 --domain 0.5 0.7", "--domain LOW HIGH"),
    "labels cut away": (on("fewer-labels.npz") + " -n 3", "12 samples but 4 labels"),
    "classes": (word("--classes a,,b"), "give each name once"),
    "attack": ("attack digits-mlp --eps 0.1", "is a part of `wassail evaluate`"),
}


def split(text: str) -> list[str]:
    """Words; what stands between double quotes is one."""
    parts = text.split('"')
    return [w for i, part in enumerate(parts) for w in ([part] if i % 2 else part.split())]


def parser_of(command: str) -> argparse.ArgumentParser:
    """Of the command that these words begin with."""
    return parser._child(parser._parser(), split(command))


@pytest.mark.few(48)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_exit_code_2_and_one_sentence(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command, words = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            code = main(split(command))
        except SystemExit as end:  # of the parser
            code = int(end.code or 0)
    out, said = capsys.readouterr()
    assert code == 2 and words in said, (code, said)
    assert said.startswith("wassail: ") and said.count("\n") == 1 and said[-2] in ".?", said
    assert any(mark in said[9:] for mark in (": ", "; ", ", ")) and "Traceback" not in said, said
    assert not out, out
    here = parser_of(command)._option_string_actions
    named = re.sub(r"evaluate (has )?--[a-z-]+", "", said)  # an option of another command
    for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", named):
        assert option in here or option in command, (option, said)
