"""Training programs composed of parts, as a hypothesis strategy: every part goes with every other.

Parts are written with the names `model`, `optimizer`, `loader`, `val_loader` and `dataset`; in a
trainer class these become attributes. The line BODY stands for what a loop does.
"""

from __future__ import annotations

import re

from hypothesis import strategies as st

_SHARED = ("model", "optimizer", "loader", "val_loader", "dataset", "critic", "other")
_ATTRIBUTE = re.compile(rf"(?<![\w.'\"])({'|'.join(_SHARED)})\b(?!=[^=]|')")


def parts(text: str) -> list[str]:
    """The alternatives in a text, which lines of dashes part."""
    return [part.strip("\n") for part in text.split("\n---\n")]


HEADERS = parts('''
import os
---
#!/usr/bin/env python
# -*- coding: utf-8 -*-
import os
---
"""Trains a network, in short: żółć."""
import os, sys
---
# Copyright: nobody

from __future__ import print_function

import os
''')
IMPORTS = """\
import argparse
import logging
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
"""
MORE_IMPORTS = parts("""
import torch.distributed as dist
---
from torch import distributed
---
from torch.utils import data as dist
---
import os.path as os_path, itertools as builtins
---
import torch.backends.cudnn as cudnn
cudnn.benchmark = True
""")
TQDM = parts("""
from tqdm import tqdm
---
try:
    from tqdm import tqdm
except ImportError:
    tqdm = list
---
import tqdm as progress
def tqdm(items, **options): return progress.tqdm(items, **options)
""")
NETS = parts("""
class Net(nn.Module):
    def __init__(self, width=4):
        super(Net, self).__init__()
        self.blocks = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x): return self.head(self.blocks(x))

    def features(self, x): return self.blocks(x)
def out_of(net, x): return net(x)
---
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self, width=4):
        super(Net, self).__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(x))

    def features(self, x):
        return self.blocks(x)


def out_of(net, x):
    return net(x)
---
from torchvision.models import resnet18 as Net
from helpers import out_of
""")
OPTIONS = parts("""
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", "-b", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--gpu", default="0,1", help="which GPUs")
parser.add_argument("--resume", default="")
args = parser.parse_args()
---
class args:
    batch_size, epochs, lr, gpu, resume = 8, 2, 0.1, '0,1', ''
""")
STARTS = parts("""
torch.manual_seed(0)
---
random.seed(1); np.random.seed(1); torch.manual_seed(1)
---
os.environ['CUDA_VISIBLE_DEVICES'] = args.gpu
---
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
---
logging.basicConfig(filename='log.txt', level=logging.INFO)
---
if not os.path.exists('out'): os.makedirs('out')
---
os.makedirs('out', exist_ok=True)
---
print('starting',
      args.lr)
""")
MODELS = parts("""
model = Net()
---
model = Net().cuda()
---
model = Net(
    width=4,
)
---
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
---
model = nn.Linear(4, 3); model.cuda()
""")
WRAPS = parts("""
model = nn.DataParallel(model)
---
model = torch.nn.DataParallel(model).cuda()
---
model = nn.DataParallel(model, device_ids=[0, 1])
---
model = nn.parallel.DataParallel(
    model,  # the net
    device_ids=range(torch.cuda.device_count()),
)
---
if torch.cuda.device_count() > 1:
    print('GPUs:', torch.cuda.device_count())
    model = nn.DataParallel(model)
---
if torch.cuda.device_count() > 1: model = nn.DataParallel(model)
---
if torch.cuda.is_available():
    model.cuda()
    model = torch.nn.DataParallel(model)
else:
    model.cpu()
---
if ',' in args.gpu:
    model = nn.DataParallel(model, device_ids=[int(i) for i in args.gpu.split(',')])
---
model = nn.DataParallel(model) if torch.cuda.device_count() > 1 else model
---
gpus = [int(i) for i in args.gpu.split(',')]; model = nn.DataParallel(model, gpus).cuda(gpus[0])
---
parallel = len(args.gpu) > 1
if parallel: model = nn.DataParallel(model)
net = model.module if parallel else model
---
from torch.nn import DataParallel as DP
model = DP(model); model.cuda()
---
model.blocks = nn.DataParallel(model.features)
---
pass
""")
OPTIMIZERS = parts("""
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
---
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=args.lr * 2)
---
optimizer = torch.optim.SGD([{'params': model.parameters()}], args.lr, momentum=.9)
""")
LOADERS = parts("""
loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
---
loader = DataLoader(dataset, args.batch_size, True, num_workers=0)
---
loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=args.lr > 0, drop_last=True)
---
loader = DataLoader(
    dataset,
    batch_size=4 * 2,  # all GPUs
    shuffle=True,
)
---
loader = DataLoader(dataset, args.batch_size, sampler=torch.utils.data.RandomSampler(dataset))
---
loader = DataLoader(dataset, batch_sampler=torch.utils.data.BatchSampler(
    torch.utils.data.SequentialSampler(dataset), args.batch_size, False))
---
loader = torch.utils.data.DataLoader(dataset, **dict(batch_size=4, shuffle=True))
---
loader = DataLoader(dataset=dataset, batch_size=args.batch_size, shuffle=True, pin_memory=True,)
""")
RESUMES = parts("""
pass
---
model.load_state_dict(torch.load(args.resume))
---
if args.resume:
    checkpoint = torch.load(args.resume)
    model.load_state_dict(checkpoint['net'])
    optimizer.load_state_dict(checkpoint['optimizer'])
---
if os.path.isfile(args.resume): model.module.load_state_dict(torch.load(args.resume, 'cpu'))
""")
STEPS = parts("""
optimizer.zero_grad()
loss = criterion(model(x), y)
loss.backward()
optimizer.step()
---
loss = criterion(model(x.cuda()), y); optimizer.zero_grad(); loss.backward(); optimizer.step()
---
out = model.forward(x)
loss = nn.functional.cross_entropy(out, y, reduction='sum') / len(x)
optimizer.zero_grad()
loss.backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
---
optimizer.zero_grad()
criterion(nn.parallel.data_parallel(model, x), y).backward(); optimizer.step()
loss = torch.zeros(1)
---
loss = criterion(model.module.features(x), y).mean()
loss.backward()
if step % 2 == 0: optimizer.step(); optimizer.zero_grad()
""")
SECOND_STEP = "other.zero_grad(); critic(x).mean().backward(); other.step()"
AFTER_STEP = parts("""
total += loss.item()
---
if step % 10 == 0: print(epoch, step, loss.item())
---
if step % 10 == 0:
    print('loss %f' % loss.data)
    logging.info('%d', step)
---
writer.add_scalar('loss', loss.item(), step)
---
losses.append(float(loss)); print(losses[-1], end='')
---
total += (out_of(model, x).argmax(1) == y).sum().item()
---
if loss.item() > 1e4: break
---
if np.isnan(loss.item()):
    continue
---
if args.lr: total = total + loss.item()
else: total += loss.detach().cpu().numpy() * x.size(0)
---
losses += [loss.item(),
    # a comment at a place of its own
  step]
---
print(f"{epoch}: {loss.item():.3f} "
      f"of {len(loader)}"); writer.add_scalar("x", loss, step)
---
assert not torch.isnan(loss), \\
    'not a number'
""")
LOOPS = parts("""
for step, (x, y) in enumerate(loader):
    BODY
---
for x, y in loader:
    step += 1
    BODY
---
for step, batch in enumerate(tqdm(loader)):
    x, y = batch
    BODY
---
it = iter(loader)
while step < len(loader):
    x, y = next(it)
    step += 1
    BODY
---
pbar = tqdm(loader, desc='train')
for x, y in pbar:
    BODY
    pbar.set_postfix(loss=loss.item())
""")
EPOCHS = parts("""
for epoch in range(args.epochs):
    BODY
---
epoch = 0
while epoch < args.epochs:
    epoch += 1
    BODY
---
for epoch in range(1, args.epochs + 1):
    print('epoch', epoch)
    BODY
---
try:
    for epoch in range(args.epochs):
        BODY
except KeyboardInterrupt: print('stopped')
---
best = 0
for epoch in range(args.epochs):
    BODY
    if total > best: best = total; torch.save(model.state_dict(), 'best.pth')
    elif total < 0: break
""")
VALIDATIONS = parts("""
pass
---
model.eval()
with torch.no_grad():
    correct = 0
    for x, y in val_loader:
        correct += (model(x).argmax(1) == y).sum().item()
print('accuracy', correct / len(val_loader.dataset))
model.train()
---
with torch.no_grad(): print(sum(criterion(model(x), y).item() for x, y in val_loader) / 4)
""")
SAVES = parts("""
pass
---
torch.save(model.state_dict(), 'out/net.pth')
---
torch.save(model.module.state_dict(), os.path.join('out', 'net_%d.pth' % epoch))
---
torch.save({'net': model.state_dict(), 'optimizer': optimizer.state_dict(), 'epoch': epoch}, 'c')
---
torch.save(model, 'model.pth')
---
if epoch % 2 == 0: torch.save(model.state_dict(), 'net.pth'); print('saved')
---
with open('log.csv', 'a') as f:
    f.write(f'{epoch},{total}\\n')
---
with open('log.csv', 'a') as f: print(epoch, total, file=f)
---
try: torch.save(model.state_dict(), 'net.pth')
except OSError: print('disk full')
finally: logging.info('epoch %d', epoch)
---
np.save('losses.npy', losses); logging.info('saved')
---
state = model.state_dict()
for key in state:
    state[key] = state[key].cpu()
torch.save(state, 'net.pth')
""")
WRITERS = parts("""
writer = logging.getLogger()
---
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter('runs')
""")
ENDS = parts("""
if __name__ == '__main__':
    main()
---
if __name__ == "__main__": main()
---
main()
""")
NOISE = ["# odd", "        # deep", "    ", "\f", "", "# żółć"]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line.strip() else line for line in text.split("\n"))


def _filled(loop: str, body: str) -> str:
    """`body` in the place of the line BODY, at its depth."""

    def at_depth(line: re.Match[str]) -> str:
        return "\n".join(line[1] + item if item.strip() else item for item in body.split("\n"))

    return re.sub(r"^( *)BODY$", at_depth, loop, flags=re.M)


def _attributes(text: str) -> str:
    return _ATTRIBUTE.sub(r"self.\1", text)


@st.composite
def _pieces(draw: st.DrawFn) -> dict[str, str]:
    """What a program does, by stage."""

    def one(choices: list[str]) -> str:
        return draw(st.sampled_from(choices))

    def some(choices: list[str]) -> str:
        return "\n".join(draw(st.lists(st.sampled_from(choices), max_size=3, unique=True)))

    model, wrap, optimizer = one(MODELS), one(WRAPS), one(OPTIMIZERS)
    made = draw(st.sampled_from([[model, wrap, optimizer], [model, optimizer, wrap]]))
    steps = [one(STEPS), some(AFTER_STEP)]
    if draw(st.booleans()):
        made += ["critic = nn.DataParallel(Net())", "other = torch.optim.Adam(critic.parameters())"]
        steps.append(SECOND_STEP)
    data = "dataset = TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))"
    made = [data, one(LOADERS), "val_loader = DataLoader(dataset, batch_size=4)", *made]
    state = ["criterion = nn.CrossEntropyLoss()", "losses, total, step = [], 0, 0", one(WRITERS)]
    return {
        "imports": "\n".join([one(HEADERS), IMPORTS + some(MORE_IMPORTS), one(TQDM)]),
        "classes": f"\n{one(NETS)}\n",
        "options": one(OPTIONS),
        "setup": "\n".join([some(STARTS), *made, one(RESUMES)]),
        "state": "\n".join(state),
        "steps": _filled(one(LOOPS), "\n".join(steps)),
        "epochs": one(EPOCHS),
        "after": "\n".join([one(VALIDATIONS), one(SAVES)]),
    }


def _at_top(piece: dict[str, str]) -> list[str]:
    loop = _filled(piece["epochs"], piece["steps"] + "\n" + piece["after"])
    return [piece["options"], piece["setup"], piece["state"], loop]


def _in_main(piece: dict[str, str], end: str) -> list[str]:
    return ["def main():", _indented("\n".join(_at_top(piece))), "\n", end]


def _with_step_function(piece: dict[str, str], end: str) -> list[str]:
    names = "loader, model, optimizer, criterion, writer, epoch, step=0, losses=[], total=0"
    if "critic" in piece["setup"]:
        names = f"critic, other, {names}"
    call = f"total = train({names.replace('step=0, losses=[], total=0', 'step')})"
    loop = _filled(piece["epochs"], call + "\n" + piece["after"])
    main = "\n".join([piece["setup"], piece["state"], loop])
    train = piece["steps"] + "\nreturn total"
    options = [piece["options"], "", ""]
    return [
        *options,
        f"def train({names}):",
        _indented(train),
        "\n",
        "def main():",
        _indented(main),
        "",
        end,
    ]


def _as_trainer(piece: dict[str, str], end: str) -> list[str]:
    loop = _filled(piece["epochs"], piece["steps"] + "\n" + piece["after"])
    fit = re.sub(r"\bargs\b", "self.args", _attributes(piece["state"] + "\n" + loop))
    init = "self.args = args\n" + _attributes(piece["setup"])
    methods = ["def __init__(self, args):", _indented(init), "", "def fit(self):", _indented(fit)]
    main = ["def main():", _indented(piece["options"] + "\ntrainer = Trainer(args)\ntrainer.fit()")]
    return ["class Trainer:", _indented("\n".join(methods)), "\n", *main, "", end]


@st.composite
def programs(draw: st.DrawFn) -> bytes:
    """The file of a training program."""
    piece, end = draw(_pieces()), draw(st.sampled_from(ENDS))
    shapes = [
        _at_top(piece),
        _in_main(piece, end),
        _with_step_function(piece, end),
        _as_trainer(piece, end),
    ]
    shape = draw(st.sampled_from(shapes))
    lines = "\n".join([piece["imports"], piece["classes"], *shape]).split("\n")
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(12, len(lines)))
        continued = lines[place - 1].endswith("\\")
        lines.insert(place - continued, draw(st.sampled_from(NOISE)))
    step = draw(st.sampled_from(["    ", "    ", "\t", "  "]))
    indented = [re.sub(r"^( {4})+", lambda m: step * (len(m[0]) // 4), line) for line in lines]
    newline = draw(st.sampled_from(["\n", "\n", "\r\n"]))
    return (newline.join(indented) + draw(st.sampled_from([newline, ""]))).encode()
