"""Verbs that give a result to others: push."""

from __future__ import annotations

import argparse


def push(args: argparse.Namespace) -> None:
    """upload a run's result and its model card to the hub"""
    from simpletune.cli.push_result import push as run

    run(args.run, args.repository, args.private, args.yes)


def push_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``push``."""
    parser.add_argument("run", metavar="RUN[@STEP]", help="a run, such as runs/demo, or a checkpoint of a LoRA run")
    parser.add_argument("repository", metavar="REPO", help="owner/name on the hub; made if there is none")
    parser.add_argument("--private", action="store_true", help="only you may see it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


VERBS = {"push": (push, push_arguments)}
