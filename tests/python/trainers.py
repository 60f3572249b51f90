"""Run as a program: trains with HF's Trainer or Lightning, is interrupted, and resumes from the checkpoint.

    trainers.py hugging-face|lightning FOLDER NVME

The model is managed, with a host_memory of a quarter of its weights; then a plain one makes the same steps
without an interruption. Prints "managed|plain <step> <loss>".
"""

import gc
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers
import zinf

STEPS = 4
SAVED = 2  # the step that a run is interrupted after


def build(dropout):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=256,
        n_layer=20,
        n_head=4,
        vocab_size=256,
        n_positions=8,
        activation_function="gelu",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def batches(count):
    tokens = torch.randint(0, 256, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))


def hugging_face(model, optimizer, folder, steps, resume):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=SAVED,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=batches(16), optimizers=(optimizer, schedule(optimizer))
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def lightning(model, optimizer, folder, steps, resume):
    import lightning

    losses = {}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def configure_optimizers(self):
            return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

        def training_step(self, batch, _):
            loss = self.model(**batch).loss
            losses[self.global_step + 1] = loss.item()
            return loss

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(
                folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # An epoch has two steps, as Lightning resumes at the begin of one.
    loader = torch.utils.data.DataLoader(batches(4), batch_size=2)
    trainer.fit(Module(), loader, ckpt_path=f"{folder}/step={SAVED}.ckpt" if resume else None)
    return losses


def main(how, folder, nvme):
    train = {"hugging-face": hugging_face, "lightning": lightning}[how]
    # HF's Trainer looks at the gradients' norm; Lightning keeps no random states.
    update, dropout = ("step", 0.1) if how == "hugging-face" else ("backward", 0.0)
    budget = sum(parameter.nbytes for parameter in build(dropout).parameters()) // 4
    losses = {}
    for steps, resume in ((SAVED, False), (STEPS, True)):
        with zinf.Engine(host_memory=budget, nvme=nvme) as engine:
            with engine.init():
                model = build(dropout)
            optimizer = zinf.AdamW(model.parameters(), lr=1e-3, update=update)
            losses |= train(model, optimizer, f"{folder}/managed", steps, resume)
            del model, optimizer  # the engine is closed without giving them back
            gc.collect()
    model = build(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plain = train(model, optimizer, f"{folder}/plain", STEPS, resume=False)
    for name, values in {"managed": losses, "plain": plain}.items():
        for step, loss in values.items():
            sys.stdout.write(f"{name} {step} {loss!r}\n")


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(*sys.argv[1:])
