"""Verbs that share a result: push."""

from __future__ import annotations

import argparse


def push(args: argparse.Namespace) -> None:
    """upload a run's result and model card to the hub"""
    from simpletune.runs.push import push as run

    run(args.run, args.repository, args.private, args.yes)


def push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``push``."""
    parser.add_argument("run", metavar="RUN[@STEP]", help="a run such as runs/demo, or a checkpoint of a LoRA run")
    parser.add_argument("repository", metavar="REPO", help="owner/name on the hub; created if missing")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


VERBS = {"push": (push, push_arguments)}
