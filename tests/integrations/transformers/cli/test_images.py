"""`attnmux generate --image`: files and texts through the checkpoint's own processor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoProcessor, PreTrainedTokenizerFast

from attnmux.core import InvalidInput
from attnmux.core.cli.verbs import verbs
from attnmux.transformers import open_checkpoint
from attnmux.transformers.load import media as files

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<b> <image> <e> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}w7"
)
GEMMA_TEMPLATE = TEMPLATE.replace("<b> <image> <e>", "<b>")


def tokenizer():
    vocabulary = {f"w{index}": index for index in range(90)}
    vocabulary.update({"<image>": 90, "[UNK]": 91, "<b>": 92, "<e>": 93, "w94": 94, "w95": 95})
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"image_token": "<image>", "boi_token": "<b>", "eoi_token": "<e>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", extra_special_tokens=special
    )


def llava_processor():
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    return transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )


def gemma_processor():
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return transformers.Gemma3Processor(
        images, tokenizer(), image_seq_length=4, chat_template=GEMMA_TEMPLATE
    )


def qwen_processor():
    try:
        video = transformers.Qwen2VLVideoProcessor(patch_size=4, merge_size=2)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"the processor of Qwen2.5-VL needs torchvision: {error}")
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return transformers.Qwen2_5_VLProcessor(images, tokenizer(), video, chat_template=TEMPLATE)


PROCESSORS = {
    "llava": llava_processor,
    "gemma3-images": gemma_processor,
    "qwen2.5-vl": qwen_processor,
}


@pytest.fixture(params=list(PROCESSORS))
def checkpoint(request, tiny):
    """(the model, its folder with a processor, what stands for an image in a text)."""
    model, folder = tiny(request.param)
    PROCESSORS[request.param]().save_pretrained(folder)
    return model, folder, "<b>" if request.param == "gemma3-images" else "<b> <image> <e>"


@pytest.fixture
def pictures(tmp_path):
    """Files of random pixels, of several sizes and formats."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, height, width in (("a.png", 16, 24), ("b.png", 24, 16), ("c.bmp", 32, 32)):
        pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / name)
        found.append(str(tmp_path / name))
    return found


def expected_text(model, folder, text, paths, num, **kwargs):
    """What transformers' own attention answers."""
    processor = AutoProcessor.from_pretrained(folder)
    images = [Image.open(path).convert("RGB") for path in paths]
    given = processor(text=[text], images=[images], return_tensors="pt", **kwargs)
    whole = model.generate(**given, max_new_tokens=num, do_sample=False)[0]
    return processor.tokenizer.decode(
        whole[given["input_ids"].shape[1] :], skip_special_tokens=True
    )


def generate(*arguments):
    common = ["--device", "cpu", "--backend", "torch_native"]
    return CliRunner().invoke(
        verbs, ["generate", *map(str, arguments), *common, "--context", "128"]
    )


def texts(result):
    assert result.exit_code == 0, result.output
    return [one["text"].strip() for one in json.loads(result.stdout)["results"]]


def test_texts_are_those_of_transformers(checkpoint, pictures, tmp_path):
    model, folder, mark = checkpoint
    two = f"w1 {mark} w2 {mark} w3"
    lines = [
        {"prompt": f"{mark} w5", "images": pictures[:1]},
        {"prompt": "w8 w9"},
        {"prompt": two, "images": pictures[1:], "max_new_tokens": 3},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", folder, "--prompts", file, "--max-new-tokens", 6, "--json")
    result = generate(two, "--image", pictures[0], "--image", pictures[2], *options)
    found = texts(result)
    assert found[0] == expected_text(model, folder, two, [pictures[0], pictures[2]], 6)
    assert found[1] == expected_text(model, folder, f"{mark} w5", pictures[:1], 6)
    assert found[3] == expected_text(model, folder, two, pictures[1:], 3)


def test_the_chat_template_puts_images_before_the_text(checkpoint, pictures):
    model, folder, mark = checkpoint
    given = ("w4 w5", "--image", pictures[0], "--image", pictures[1], "--chat")
    given += ("--mm-backend", "torch_native")
    found = texts(generate(*given, "--model", folder, "--max-new-tokens", 6, "--json"))
    shown = f"{mark} {mark} w4 w5 w7"
    assert found == [expected_text(model, folder, shown, pictures[:2], 6, add_special_tokens=False)]


def said(result):
    assert result.exit_code != 0, result.output
    return result.output


def test_mistakes_are_told(tiny, pictures, tmp_path):
    _, folder = tiny("llava")
    llava_processor().save_pretrained(folder)
    options = ("--model", folder, "--max-new-tokens", 2)
    picture = ("--image", pictures[0])
    assert "0 placeholders <image> for 1 images" in said(generate("w1", *picture, *options))
    assert "2 placeholders" in said(generate("<image> <image>", *picture, *options))
    assert "--image" in said(generate("w1 <image>", *options))
    assert "needs a PROMPT" in said(generate(*picture, *options))
    missing = said(generate("<image>", "--image", tmp_path / "no.png", *options))
    assert "no.png (No such file" in missing
    text = tmp_path / "text.png"
    text.write_text("no image")
    assert "format Pillow does not know" in said(generate("<image>", "--image", text, *options))
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(pictures[0]).read_bytes()[:200])
    assert "broken.png" in said(generate("<image>", "--image", broken, *options))
    assert "drafts" in said(generate("w1 <image> w2", *picture, *options, "--draft", "ngram"))


def test_a_model_of_text_alone_is_told(tiny, pictures):
    _, folder = tiny("llama")
    for model in (("--model", folder), ()):
        assert "reads only text" in said(generate("w1", "--image", pictures[0], *model))


def test_a_checkpoint_without_a_processor(tiny, pictures):
    _, folder = tiny("gemma3-nested")
    tokenizer().save_pretrained(folder)
    assert "preprocessor_config.json" in said(
        generate("<image>", "--image", pictures[0], "--model", folder)
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "w1", "images": "a.png"}, "list"),
        ({"prompt": "w1", "images": [1]}, "names of files"),
        ({"prompt": [1, 2], "images": ["a.png"]}, "expected text"),
    ],
)
def test_lines_with_wrong_images(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(line))
    assert message in said(generate("--prompts", file))


def test_a_missing_package_is_named(tiny, monkeypatch):
    _, folder = tiny("llava")
    llava_processor().save_pretrained(folder)
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"no Pillow.*|attnmux-transformers\[images\]"):
        files.ImageProcessor(open_checkpoint(folder))


def test_an_image_is_turned_as_its_metadata_says(tmp_path):
    image = Image.new("RGB", (4, 2))
    metadata = image.getexif()
    metadata[0x0112] = 6  # turned by 90 degrees
    image.save(tmp_path / "turned.jpg", exif=metadata)
    assert files.read_image(str(tmp_path / "turned.jpg")).size == (2, 4)


def test_an_image_of_16_bits_keeps_its_greys(tmp_path):
    greys = np.array([[0, 257 * 10, 257 * 200, 65535]], dtype=np.uint16)
    Image.fromarray(greys).save(tmp_path / "deep.png")
    read = np.asarray(files.read_image(str(tmp_path / "deep.png")))
    assert read[0, :, 0].tolist() == [0, 10, 200, 255]
    assert read.shape == (1, 4, 3)
    for name, wide in (("a.tif", greys.astype(np.int32) * 2), ("b.tif", greys / np.float32(9))):
        Image.fromarray(wide).save(tmp_path / name)
        with pytest.raises(InvalidInput, match=r"8 or 16 bits.*pixels from 0 to"):
            files.read_image(str(tmp_path / name))
