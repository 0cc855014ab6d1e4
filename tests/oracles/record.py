"""Score tiny random checkpoints with the ORIGINAL packages and record the values as test data.

Runs in an environment of its own (`make oracles`), where hpsv2 1.2.0 and image-reward 1.5 are installed; the
patches below are what they need on current Python and transformers. Usage: record.py OUTPUT.json
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
import tiny


def main(output: Path) -> None:
    """Write versions and scores: name -> [image][prompt]."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        scores = {
            "hpsv2.1": hps(tiny.hps(root / "hps")),
            "image_reward": image_reward(tiny.image_reward(root / "image_reward")),
            "pickscore": pickscore(tiny.clip_hf(root / "pickscore", seed=2, activation="gelu")),
            "aesthetic": aesthetic(tiny.aesthetic(root / "aesthetic")),
        }
    packages = ("hpsv2", "image-reward", "torch", "torchvision", "transformers", "pillow")
    versions = {package: importlib.metadata.version(package) for package in packages}
    output.write_text(json.dumps({"versions": versions, "scores": scores}, indent=1) + "\n")


def hps(folder: Path) -> list[list[float]]:
    """Return hpsv2.img_score.score of every image and prompt."""
    img_score = import_original(folder)
    checkpoint = str(folder / tiny.HPS_FILE)
    return [
        [float(img_score.score(image, prompt, cp=checkpoint)[0]) for prompt in tiny.PROMPTS]
        for image in tiny.images()
    ]


def import_original(folder: Path) -> Any:
    """Return hpsv2's module img_score with a model of the sizes in `tiny` instead of its ViT-H-14."""
    _import_torchvision()
    sys.modules.setdefault("turtle", types.SimpleNamespace(forward=None))  # imported, never used
    with _redirect(folder / "bpe_simple_vocab_16e6.txt.gz"):
        from hpsv2 import img_score
        from hpsv2.src.open_clip import model as open_clip
        from hpsv2.src.open_clip.transform import image_transform
    text = open_clip.CLIPTextCfg(**tiny.HPS_TEXT, vocab_size=tiny.VOCABULARY)
    vision = open_clip.CLIPVisionCfg(**tiny.HPS_VISION)
    img_score.model_dict["model"] = open_clip.CLIP(tiny.HPS_EMBED, vision, text, output_dict=True)
    img_score.model_dict["preprocess_val"] = image_transform(
        tiny.SIDE, is_train=False, resize_longest_max=True
    )
    return img_score


def image_reward(folder: Path) -> list[list[float]]:
    """Return ImageReward.score of every image and prompt, with a tower of the tiny sizes."""
    import transformers
    from transformers import BertTokenizer, modeling_utils, pytorch_utils

    sys.modules.setdefault("clip", types.ModuleType("clip"))  # OpenAI's package, for other scores only
    for helper in ("apply_chunking_to_forward", "prune_linear_layer"):
        setattr(modeling_utils, helper, getattr(pytorch_utils, helper, None))
    modeling_utils.find_pruneable_heads_and_indices = None
    import ImageReward
    from ImageReward.models.BLIP import blip_pretrain, med
    from ImageReward.models.BLIP.vit import VisionTransformer

    def tokenizer() -> Any:
        result = BertTokenizer.from_pretrained(str(folder))
        result.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
        return result

    def tower(*_: Any) -> tuple[Any, int]:
        width = tiny.BLIP_WIDTH
        sizes = {"img_size": tiny.SIDE, "patch_size": tiny.BLIP_PATCH, "embed_dim": width}
        return VisionTransformer(**sizes, depth=tiny.BLIP_DEPTH, num_heads=width // 64), width

    med.BertModel.all_tied_weights_keys = {}
    med.BertModel.tie_weights = lambda self, *a, **k: None
    base = med.BertPreTrainedModel
    base.invert_attention_mask = lambda self, mask: (1.0 - mask[:, None, None, :].float()) * torch.finfo().min
    base.get_head_mask = lambda self, head_mask, layers, *a: [None] * layers
    transformers.logging.set_verbosity_error()
    with (
        mock.patch.object(blip_pretrain, "create_vit", tower),
        mock.patch.object(blip_pretrain, "init_tokenizer", tokenizer),
    ):
        config = str(folder / "med_config.json")
        model = ImageReward.load(str(folder / "ImageReward.pt"), device="cpu", med_config=config)
    model.preprocess = sys.modules["ImageReward.ImageReward"]._transform(tiny.SIDE)
    with torch.no_grad():
        return [[float(model.score(prompt, image)) for prompt in tiny.PROMPTS] for image in tiny.images()]


def pickscore(folder: Path) -> list[list[float]]:
    """Return logits per image of transformers' CLIPModel on its own PIL processor, as the model card does."""
    model, pixels, ids = _clip(folder)
    with torch.no_grad():
        return [[float(model(pixel_values=p, **i).logits_per_image) for i in ids] for p in pixels]


def aesthetic(folder: Path) -> list[list[float]]:
    """Return image-reward's copy of the predictor on the unit embedding (one value per image)."""
    from ImageReward.ImageReward import _transform
    from ImageReward.models.AestheticScore import MLP

    head = MLP(768)
    head.load_state_dict(torch.load(folder / tiny.AESTHETIC_FILE, weights_only=True))
    head.eval()
    model, _, ids = _clip(folder)
    pixels = [_transform(tiny.SIDE)(image)[None] for image in tiny.images()]  # the same as OpenAI's CLIP
    with torch.no_grad():
        embeddings = [model(pixel_values=p, **ids[0]).image_embeds for p in pixels]  # of unit length
        return [[float(head(embedding))] for embedding in embeddings]


def _clip(folder: Path) -> tuple[Any, list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    from transformers import CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"shortest_edge": tiny.SIDE}
    crop = {"height": tiny.SIDE, "width": tiny.SIDE}
    processor = CLIPImageProcessorPil(size=side, crop_size=crop)
    pixels = [processor(images=image, return_tensors="pt")["pixel_values"] for image in tiny.images()]
    tokenizer = CLIPTokenizer.from_pretrained(str(folder))
    limits = {"padding": True, "truncation": True, "max_length": 77, "return_tensors": "pt"}
    ids = [dict(tokenizer([prompt], **limits)) for prompt in tiny.PROMPTS]
    return CLIPModel.from_pretrained(str(folder)).eval(), pixels, ids


def _import_torchvision() -> None:
    """Import torchvision also where its wheel, built for CUDA, stands beside the CPU build of torch.

    Its operators don't load there, but the scorers use its Python code alone, which imports once the two
    operators that it looks for are declared.
    """
    with contextlib.suppress(RuntimeError):
        import torchvision  # noqa: F401

        return
    for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[module]
    for operator in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{operator}", signature)


@contextlib.contextmanager
def _redirect(vocabulary: Path) -> Iterator[None]:
    """Give hpsv2 the vocabulary that its wheel lacks; it is read while importing."""
    original = gzip.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(vocabulary if str(path).endswith(vocabulary.name) else path, *args, **kwargs)

    with mock.patch.object(gzip, "open", opened):
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]))
