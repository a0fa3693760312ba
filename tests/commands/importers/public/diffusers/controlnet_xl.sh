PYTHONPATH=../../.. \
accelerate launch train_controlnet_sdxl.py \
 --pretrained_model_name_or_path="stabilityai/stable-diffusion-xl-base-1.0" \
 --dataset_name="a/fill50k" \
 --resolution=1024 \
 --learning_rate=1e-5 \
 --max_train_steps=15000
