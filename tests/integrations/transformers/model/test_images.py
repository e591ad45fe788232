"""Prompts with images: the text is what transformers' own eager attention gives each prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import InvalidInput, NoBackend, Offer, Plugins
from attnmux.core.find.cpu import probe_cpu
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    NgramProposer,
    Prompt,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.engine import scheduler
from attnmux.transformers.model.images.capture import ImageReader

IMAGE, BEGIN, END = 90, 92, 93
MODELS = ["qwen2.5-vl", "gemma3-images", "llava"]
TEXT = range(1, 80)


class Pictures:
    """Random prompts of a model, as its processor would return them."""

    def __init__(self, name, seed=0):
        self.name = name
        self.generator = torch.Generator().manual_seed(seed)

    def text(self, num):
        return torch.randint(TEXT.start, TEXT.stop, (num,), generator=self.generator).tolist()

    def image(self, grid=(1, 4, 4)):
        """(number of placeholders, its tensors)."""
        if self.name == "qwen2.5-vl":
            patches = grid[0] * grid[1] * grid[2]
            pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=self.generator)
            return patches // 4, (pixels, torch.tensor([grid]))
        pixels = torch.randn(1, 3, 16, 16, generator=self.generator)
        return 4, (pixels,)

    def prompt(self, *parts):
        """parts: lists of token ids, and images."""
        ids, tensors = [], []
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            ids += [BEGIN] + [IMAGE] * part[0] + [END]
            tensors.append(part[1])
        tokens = torch.tensor([ids])
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        kinds = {"qwen2.5-vl": "mm_token_type_ids", "gemma3-images": "token_type_ids"}
        if self.name in kinds:
            given[kinds[self.name]] = (tokens == IMAGE).int()
        if tensors:
            columns = [torch.cat(each) for each in zip(*tensors, strict=True)]
            names = ("pixel_values", "image_grid_thw")
            given.update(zip(names, columns, strict=False))
        return given

    def several(self):
        """One image, two images of other sizes, an image at the start, and text alone."""
        two = self.image((1, 6, 4)), self.image((1, 4, 10))
        return [
            self.prompt(self.text(3), self.image((1, 8, 12)), self.text(5)),
            self.prompt(self.text(9), two[0], self.text(2), two[1], self.text(1)),
            self.prompt(self.image((1, 4, 4)), self.text(14)),
            self.prompt(self.text(11)),
        ]


def alone(model, inputs, num):
    """What transformers' own attention generates for each."""
    texts = []
    for each in inputs:
        given = each
        if "pixel_values" not in each:
            given = {name: each[name] for name in ("input_ids", "attention_mask")}
        whole = model.generate(**given, max_new_tokens=num, do_sample=False)[0].tolist()
        texts.append(tuple(whole[each["input_ids"].shape[1] :]))
    return texts


def prompts_of(runner, inputs, num):
    prompts = []
    for each in inputs:
        images = runner.read_images(each) if "pixel_values" in each else None
        ids = each["input_ids"][0].tolist()
        prompts.append(Prompt(token_ids=ids, max_new_tokens=num, images=images))
    return prompts


def results(engine, inputs, num):
    return run_prompts(engine, prompts_of(engine.runner, inputs, num)).results


def tokens(engine, inputs, num):
    try:
        return [one.token_ids for one in results(engine, inputs, num)]
    finally:
        engine.clear_cache()
        assert engine.memory.free == engine.runner.steps.allocator.size


def runner_of(run_on, folder, backend="torch_native", **changes):
    given = {"max_context_len": 128, "max_total_tokens": 512, "images": True, **changes}
    return run_on(folder, backend, **given)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(6)
def test_text_is_that_of_transformers(tiny, run_on, name, page_size, monkeypatch):
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(name)
    inputs = Pictures(name, seed=page_size).several()
    expected = alone(model, inputs, 9)
    assert len({token for text in expected for token in text}) > 12, "text that says something"
    runner = runner_of(run_on, folder, page_size=page_size)
    for options in ({}, {"prefill_tokens": 7}, {"prefix_cache": False}, {"max_running": 2}):
        assert tokens(Engine(runner, **options), inputs, 9) == expected, options
    tight = runner_of(run_on, folder, page_size=page_size, max_total_tokens=128)
    assert tokens(Engine(tight, prefill_tokens=11), inputs * 2, 9) == expected * 2


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "native") for name in MODELS),
        # Its kernels take long to compile; `test_images_masks` has it attend to images.
        *(pytest.param(name, "flex_attention", marks=pytest.mark.full) for name in MODELS),
    ],
)
def test_text_on_other_backends(tiny, run_on, name, backend):
    model, folder = tiny(name)
    inputs = Pictures(name, seed=5).several()
    runner = runner_of(run_on, folder, backend)
    assert {choice.backend for choice in runner.decision.phases.values()} == {backend}
    assert tokens(Engine(runner, prefill_tokens=9), inputs, 7) == alone(model, inputs, 7)


@pytest.mark.parametrize("name", MODELS)
def test_text_depends_on_the_image(tiny, run_on, name):
    """Otherwise the comparisons above would show nothing."""
    _, folder = tiny(name)
    pictures = Pictures(name)
    before, after = pictures.text(4), pictures.text(4)
    inputs = [pictures.prompt(before, pictures.image(), after) for _ in range(4)]
    engine = Engine(runner_of(run_on, folder))
    assert len(set(tokens(engine, inputs, 8))) > 1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(2)
def test_prefixes_match_as_far_as_the_images_do(tiny, run_on, name, page_size):
    model, folder = tiny(name)
    pictures = Pictures(name)
    stem, image, other = pictures.text(8), pictures.image(), pictures.image()
    first = pictures.prompt(stem, image, pictures.text(6))
    inputs = [
        first,
        pictures.prompt(stem, image, pictures.text(6)),
        pictures.prompt(stem, other, pictures.text(6)),
        pictures.prompt(stem, image, pictures.text(1), other, pictures.text(3)),
    ]
    engine = Engine(runner_of(run_on, folder, page_size=page_size))
    found = [results(engine, [each], 6)[0] for each in inputs]
    assert [one.token_ids for one in found] == alone(model, inputs, 6)
    # The stem, what opens the image, and its four placeholders
    before, behind = len(stem) + 1, len(stem) + 6
    whole = [each // page_size * page_size for each in (before, behind)]
    assert [one.reused_tokens for one in found] == [0, whole[1], whole[0], whole[1]]
    again = results(engine, [first], 6)[0]
    length = first["input_ids"].shape[1]
    assert again.reused_tokens == (length - 1) // page_size * page_size
    assert again.token_ids == found[0].token_ids


def test_a_prefix_may_end_inside_an_image(tiny, run_on):
    """Its tokens see each other: what is left of them sees the cached ones and itself."""
    model, folder = tiny("gemma3-images")
    pictures = Pictures("gemma3-images")
    stem, image = pictures.text(5), pictures.image()
    inputs = [pictures.prompt(stem, image, pictures.text(7)) for _ in range(2)]
    engine = Engine(runner_of(run_on, folder, page_size=8))
    found = [results(engine, [each], 6)[0] for each in inputs]
    assert [one.token_ids for one in found] == alone(model, inputs, 6)
    assert found[1].reused_tokens == 8, "two of the image's four tokens"


def test_steps_never_cut_tokens_that_see_each_other(tiny, run_on, monkeypatch):
    model, folder = tiny("gemma3-images")
    pictures = Pictures("gemma3-images", seed=3)
    inputs = pictures.several()
    runner = runner_of(run_on, folder)
    prompts = prompts_of(runner, inputs, 6)
    spans = {one.images.token_ids: one.images.spans for one in prompts if one.images}
    assert [len(found) for found in spans.values()] == [1, 2, 1]
    ends, extend = [], runner.steps.extend

    def watched(states, counts, **kwargs):
        step = extend(states, counts, **kwargs)
        ends.extend((state.images, state.num_cached) for state in states if state.images)
        return step

    monkeypatch.setattr(runner.steps, "extend", watched)
    for most in (4, 5, 6):
        engine = Engine(runner, prefill_tokens=most, prefix_cache=False)
        assert [one.token_ids for one in run_prompts(engine, prompts).results] == alone(
            model, inputs, 6
        )
        assert engine.stats.extend.steps + engine.stats.mixed.steps > len(inputs)
    assert len(ends) > 20
    assert not any(begin < end < stop for images, end in ends for begin, stop in images.spans)
    with pytest.raises(InvalidInput, match="at least 4"):
        run_prompts(Engine(runner, prefill_tokens=3), prompts)


def test_without_its_mask_the_text_is_another(tiny, run_on, monkeypatch):
    model, folder = tiny("gemma3-images")
    inputs = Pictures("gemma3-images").several()
    engine = Engine(runner_of(run_on, folder))
    expected = alone(model, inputs, 9)
    assert tokens(engine, inputs, 9) == expected
    monkeypatch.setattr("attnmux.transformers.requests.batching.mask_of", lambda *_: None)
    assert tokens(engine, inputs, 9) != expected


def test_without_their_positions_the_text_is_another(tiny, run_on, monkeypatch):
    model, folder = tiny("qwen2.5-vl")
    inputs = Pictures("qwen2.5-vl").several()
    engine = Engine(runner_of(run_on, folder))
    monkeypatch.setattr("attnmux.transformers.requests.batching.positions_of", lambda *_: None)
    assert tokens(engine, inputs, 9) != alone(model, inputs, 9)


def test_positions_go_on_from_the_largest_of_the_prompt(tiny, run_on):
    _, folder = tiny("qwen2.5-vl")
    pictures = Pictures("qwen2.5-vl")
    inputs = pictures.prompt([1, 2], pictures.image((1, 4, 12)), [3, 4])
    images = runner_of(run_on, folder).read_images(inputs)
    # 12 patches in groups of 2 x 2: 2 rows of 6 from position 3 on; then 3 + 6
    assert images.positions[:, :3].tolist() == [[0, 1, 2]] * 3
    assert images.positions[0, 3:15].tolist() == [3] * 12
    assert images.positions[1, 3:15].tolist() == [3] * 6 + [4] * 6
    assert images.positions[2, 3:15].tolist() == [3, 4, 5, 6, 7, 8] * 2
    assert images.positions[:, 15:].tolist() == [[9, 10, 11]] * 3
    assert images.delta == 12 - 18


@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_same_text(tiny, name):
    model, folder = tiny(name)
    inputs = Pictures(name, seed=8).several()
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    options = RunnerOptions(
        max_batch_size=6, max_context_len=128, max_total_tokens=512, page_size=4, images=True
    )
    runner = load_runner(open_checkpoint(folder), fake_platform(), [offer], options)
    runner.capture_graphs(batch_sizes=[1, 2, 4], devices=RecordingGraphs())
    ran, replay = [], runner.graphs.replay

    def counted(batch, inputs, *, size):
        ran.append(batch.batch_size)
        return replay(batch, inputs, size=size)

    runner.graphs.replay = counted
    assert tokens(Engine(runner, prefill_tokens=9), inputs, 9) == alone(model, inputs, 9)
    assert len(ran) > 5


@pytest.mark.parametrize("name", MODELS)
def test_the_vision_tower_packs_its_images(tiny, run_on, name, monkeypatch):
    """One call of the encoder's backend for each layer, whatever the number of images."""
    _, folder = tiny(name)
    runner = runner_of(run_on, folder)
    tower = runner.part(ImageReader).tower
    packed, attend = [], tower.attend

    def watched(q, k, v, lens, **kwargs):
        packed.append(lens.queries)
        return attend(q, k, v, lens, **kwargs)

    monkeypatch.setattr(tower, "attend", watched)
    pictures = Pictures(name)
    two = pictures.image((1, 8, 8)), pictures.image((1, 4, 4))
    runner.read_images(pictures.prompt(two[0], [1], two[1], [2]))
    whole, windows = (16, 16), ()
    if name == "llava":
        whole = (5, 5)  # with a class token
    if name == "qwen2.5-vl":
        whole, windows = (64, 16), (16,) * 5
    assert packed == ([windows, whole, windows] if windows else [whole])


def test_the_tower_has_room_for_more_and_larger_images(tiny, run_on):
    model, folder = tiny("qwen2.5-vl")
    runner = runner_of(run_on, folder, max_context_len=512, max_total_tokens=1024)
    pictures = Pictures("qwen2.5-vl")
    large = pictures.prompt([1], pictures.image((1, 40, 32)), [2, 3])
    small = pictures.prompt([1], pictures.image((1, 4, 4)), [2, 3])
    inputs = [small, large, small]
    model.config.text_config.max_position_embeddings = 512
    assert tokens(Engine(runner), inputs, 4) == alone(model, inputs, 4)


def test_a_model_that_reads_images_runs_text_alone_without_an_encoder(tiny, run_on):
    for name in MODELS:
        model, folder = tiny(name)
        runner = run_on(folder)
        assert "encoder" not in runner.decision.phases
        inputs = [Pictures(name).prompt([5, 6, 7])]
        assert tokens(Engine(runner), inputs, 6) == alone(model, inputs, 6)
        with pytest.raises(InvalidInput, match="images=True"):
            runner.read_images(inputs[0])


def test_a_model_of_text_alone_refuses_images(tiny, run_on):
    for name in ("llama", "gemma3"):
        with pytest.raises(InvalidInput, match="reads only text"):
            run_on(tiny(name)[1], images=True)


def test_backends_without_masks_are_refused_with_the_reason(tiny):
    _, folder = tiny("gemma3-images")
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "fa3"]
    options = RunnerOptions(
        max_batch_size=2, max_context_len=64, max_total_tokens=64, images=True, dtype="bfloat16"
    )
    with pytest.raises(NoBackend):
        load_runner(open_checkpoint(folder), probe_cpu(), offers, options)


def wrong(change):
    pictures = Pictures("qwen2.5-vl")
    given = pictures.prompt([1], pictures.image(), [2], pictures.image((1, 4, 8)), [3])
    change(given)
    return given


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.update(pixel_values=one["pixel_values"][:16]), "one for each placeholder"),
        (lambda one: one.update(image_grid_thw=one["image_grid_thw"][:1]), "each placeholder"),
        (lambda one: one.pop("pixel_values"), "no pixels"),
        (lambda one: one["input_ids"].fill_(1), "0 placeholders"),
        (lambda one: one["attention_mask"][:, 0].fill_(0), "padding"),
        (lambda one: one.update(input_ids=one["input_ids"].float()), "torch.float32"),
        (lambda one: one.update(input_ids=one["input_ids"].tolist()), "no input_ids in a dict"),
        (lambda one: one.update(pixel_values_videos=one["pixel_values"]), "AttributeError"),
        (lambda one: one.update(foo=torch.ones(1)), "^foo: expected nothing"),
        (lambda one: one.update(position_ids=one["input_ids"]), "position_ids too"),
        (lambda one: one.update(inputs_embeds=torch.ones(1, 17, 32)), "inputs_embeds too"),
        (
            lambda one: one.update(mm_token_type_ids=one["mm_token_type_ids"][:, 1:]),
            r"mm_token_type_ids \(1, 18\) for input_ids \(1, 19\)",
        ),
        (lambda one: one.update(input_ids=one["input_ids"].expand(2, -1)), r"\[1, P\]"),
    ],
)
def test_images_that_do_not_fit_the_prompt(tiny, run_on, change, said):
    runner = runner_of(run_on, tiny("qwen2.5-vl")[1])
    with pytest.raises(InvalidInput, match=said):
        runner.read_images(wrong(change))


def test_inputs_that_are_none(tiny, run_on):
    runner = runner_of(run_on, tiny("llava")[1])
    for inputs in (None, "cat.png", torch.ones(1, 4), []):
        with pytest.raises(InvalidInput, match=f"in a {type(inputs).__name__}"):
            runner.read_images(inputs)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3-images"])
def test_prefixes_match_as_far_as_positions_and_masks_do(tiny, run_on, name):
    """Both models count and mask tokens of images as such only where a prompt says which they are;
    else as text. Pixels and ids are the same."""
    model, folder = tiny(name)
    pictures = Pictures(name)
    whole = pictures.prompt(pictures.text(3), pictures.image(), pictures.text(6))
    plain = {key: each for key, each in whole.items() if not key.endswith("type_ids")}
    engine = Engine(runner_of(run_on, folder))
    for inputs in (whole, plain, whole):
        (result,) = results(engine, [inputs], 6)
        assert [result.token_ids] == alone(model, [inputs], 6)
        reused = result.reused_tokens
    assert reused == whole["input_ids"].shape[1] - 1
    assert alone(model, [whole], 6) != alone(model, [plain], 6)


def test_images_of_another_prompt_and_drafts_are_refused(tiny, run_on, monkeypatch):
    _, folder = tiny("llava")
    runner = runner_of(run_on, folder)
    pictures = Pictures("llava")
    images = runner.read_images(pictures.prompt([1], pictures.image(), [2]))
    engine = Engine(runner)
    with pytest.raises(InvalidInput, match="another prompt"):
        engine.add([1, 2, 3], max_new_tokens=2, images=images)
    with pytest.raises(InvalidInput, match=r"drafts.*chosen without any"):
        Engine(runner, drafts=NgramProposer(draft_token_num=3))
    monkeypatch.setattr(runner, "check_drafts", lambda topk: None)
    drafting = Engine(runner, drafts=NgramProposer(draft_token_num=3))
    with pytest.raises(InvalidInput, match="drafts"):
        drafting.add(images.token_ids, max_new_tokens=2, images=images)
    with pytest.raises(InvalidInput, match="drafts"):
        runner_of(run_on, folder, draft_tokens=3)
    assert not engine.has_work


def test_images_that_no_step_would_read_are_refused(tiny, run_on):
    """Without `images=True` a step reads the ids of placeholders, which say nothing."""
    _, folder = tiny("llava")
    runner = runner_of(run_on, folder)
    pictures = Pictures("llava")
    inputs = pictures.prompt([1], pictures.image(), [2])
    images = runner.read_images(inputs)
    narrow = replace(images, embeds=images.embeds[:, :-1])
    for one, given, said in (
        (run_on(folder), images, "without images=True"),
        (runner, narrow, "31 dims"),
        (runner, inputs, "got a dict"),
    ):
        engine = Engine(one)
        with pytest.raises(InvalidInput, match=said):
            engine.add(images.token_ids, max_new_tokens=2, images=given)
        with pytest.raises(InvalidInput, match=said):
            one.extend([SequenceState(token_ids=[*images.token_ids], images=given)])
